"""BibTeX of specsparse and of the papers behind a drafter, verifier, tree or predictor."""

from collections.abc import Mapping
from dataclasses import dataclass

from specsparse.errors import UserError
from specsparse.support.options import nearest


@dataclass(frozen=True)
class Work:
    """A paper, with its number on arXiv, or software, with a `url` or none yet."""

    title: str
    authors: tuple[str, ...]
    year: int
    arxiv: str = ""
    url: str = ""

    def bibtex(self, key: str) -> str:
        fields = {"title": "{" + self.title + "}", "author": " and ".join(self.authors), "year": str(self.year)}
        if self.arxiv:
            fields |= {"eprint": self.arxiv, "archivePrefix": "arXiv", "url": f"https://arxiv.org/abs/{self.arxiv}"}
        elif self.url:
            fields["url"] = self.url
        lines = ",\n".join(f"  {name:<13} = {{{value}}}" for name, value in fields.items())
        return f"@misc{{{key},\n{lines},\n}}"


_EAGLE = ("Yuhui Li", "Fangyun Wei", "Chao Zhang", "Hongyang Zhang")
WORKS: Mapping[str, Work] = {
    "specsparse": Work(
        "specsparse: speculative decoding and activation sparsity for GGUF models, exact and measured",
        ("The specsparse authors",), 2026,
    ),
    "leviathan2023": Work(
        "Fast Inference from Transformers via Speculative Decoding",
        ("Yaniv Leviathan", "Matan Kalman", "Yossi Matias"), 2023, "2211.17192",
    ),
    "chen2023": Work(
        "Accelerating Large Language Model Decoding with Speculative Sampling",
        ("Charlie Chen", "Sebastian Borgeaud", "Geoffrey Irving", "Jean-Baptiste Lespiau", "Laurent Sifre",
         "John Jumper"), 2023, "2302.01318",
    ),
    "specinfer": Work(
        "SpecInfer: Accelerating Generative Large Language Model Serving with Tree-based Speculative Inference and "
        "Verification", ("Xupeng Miao", "others"), 2023, "2305.09781",
    ),
    "spectr": Work(
        "SpecTr: Fast Speculative Decoding via Optimal Transport",
        ("Ziteng Sun", "Ananda Theertha Suresh", "Jae Hun Ro", "Ahmad Beirami", "Himanshu Jain", "Felix Yu"), 2023,
        "2310.15141",
    ),
    "block": Work(
        "Block Verification Accelerates Speculative Decoding", ("Ziteng Sun", "others"), 2024, "2403.10444",
    ),
    "sequoia": Work(
        "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding",
        ("Zhuoming Chen", "Avner May", "Ruslan Svirschevski", "Yuhsun Huang", "Max Ryabinin", "Zhihao Jia",
         "Beidi Chen"), 2024, "2402.12374",
    ),
    "eagle": Work(
        "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", _EAGLE, 2024, "2401.15077"
    ),
    "eagle2": Work(
        "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", _EAGLE, 2024, "2406.16858"
    ),
    "eagle3": Work(
        "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", _EAGLE, 2025,
        "2503.01840",
    ),
    "dflash": Work(
        "DFlash: Block Diffusion for Flash Speculative Decoding",
        ("Jian Chen", "Yesheng Liang", "Zhijian Liu"), 2026, "2602.06036",
    ),
    "dspark": Work(
        "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation",
        ("Xin Cheng", "Xingkai Yu", "Chenze Shao", "Jiashi Li", "Yunfan Xiong", "Yi Qian", "Jiaqi Zhu", "Shirong Ma",
         "Xiaokang Zhang", "Jiasheng Ye", "others"), 2026, "2607.05147",
    ),
    "ddtree": Work(
        "Accelerating Speculative Decoding with Block Diffusion Draft Trees",
        ("Liran Ringel", "Yaniv Romano"), 2026, "2604.12989",
    ),
    "caddtree": Work(
        "Cost-Aware Diffusion Draft Trees for Speculative Decoding",
        ("Hongliang He", "Huachuan Qiu", "Shuai Zhang", "Yong Dai"), 2026, "2606.01813",
    ),
    "hass": Work(
        "Learning Harmonized Representations for Speculative Sampling",
        ("Lefan Zhang", "Xiaodan Wang", "Yanhua Huang", "Ruiwen Xu"), 2024, "2408.15766",
    ),
    "medusa": Work(
        "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
        ("Tianle Cai", "Yuhong Li", "Zhengyang Geng", "Hongwu Peng", "Jason D. Lee", "Deming Chen", "Tri Dao"), 2024,
        "2401.10774",
    ),
    "prompt_lookup": Work(
        "Prompt Lookup Decoding", ("Apoorv Saxena",), 2023, url="https://github.com/apoorvumang/prompt-lookup-decoding"
    ),
    "suffix": Work(
        "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
        ("Gabriele Oliaro", "Zhihao Jia", "Daniel Campos", "Aurick Qiao"), 2024, "2411.04975",
    ),
    "recycle": Work(
        "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
        ("Xianzhen Luo", "others"), 2024, "2408.08696",
    ),
    "self_speculative": Work(
        "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
        ("Jun Zhang", "Jue Wang", "Huan Li", "Lidan Shou", "Ke Chen", "Gang Chen", "Sharad Mehrotra"), 2023,
        "2309.08168",
    ),
    "sparsespec": Work(
        "Accelerating Large-Scale Reasoning Model Inference with Sparse Self-Speculative Decoding",
        ("Yilong Zhao", "Jiaming Tang", "Kan Zhu", "Zihao Ye", "Chi-Chih Chang", "Chaofan Lin", "Jongseok Park",
         "Guangxuan Xiao", "Mohamed S. Abdelfattah", "Mingyu Gao", "Baris Kasikci", "Song Han", "Ion Stoica"), 2025,
        "2512.01278",
    ),
    "llama_cpp": Work("llama.cpp", ("Georgi Gerganov", "others"), 2023, url="https://github.com/ggml-org/llama.cpp"),
    "powerinfer": Work(
        "PowerInfer: Fast Large Language Model Serving with a Consumer-grade GPU",
        ("Yixin Song", "Zeyu Mi", "Haotong Xie", "Haibo Chen"), 2023, "2312.12456",
    ),
    "dejavu": Work(
        "Deja Vu: Contextual Sparsity for Efficient LLMs at Inference Time", ("Zichang Liu", "others"), 2023,
        "2310.17157",
    ),
    "cats": Work(
        "CATS: Contextually-Aware Thresholding for Sparsity in Large Language Models",
        ("Donghyun Lee", "Je-Yong Lee", "Genghan Zhang", "Mo Tiwari", "Azalia Mirhoseini"), 2024, "2404.08763",
    ),
    "griffin": Work(
        "Prompt-prompted Adaptive Structured Pruning for Efficient LLM Generation",
        ("Harry Dong", "Beidi Chen", "Yuejie Chi"), 2024, "2404.01365",
    ),
    "sparseinfer": Work(
        "SparseInfer: Training-free Prediction of Activation Sparsity for Fast LLM Inference",
        ("Jiho Shin", "Hoeseok Yang", "Youngmin Yi"), 2024, "2411.12692",
    ),
    "teal": Work(
        "Training-Free Activation Sparsity in Large Language Models",
        ("James Liu", "Pragaash Ponnusamy", "Tianle Cai", "Han Guo", "Yoon Kim", "Ben Athiwaratkun"), 2024,
        "2408.14690",
    ),
}  # fmt: skip
"""Works by BibTeX key."""

_SPECULATIVE = ("leviathan2023", "chen2023")
METHODS: Mapping[str, tuple[str, ...]] = {
    # drafters
    "prompt_lookup": ("prompt_lookup",),
    "ngram_simple": ("llama_cpp",),
    "ngram_map": ("llama_cpp",),
    "suffix": ("suffix",),
    "recycle": ("recycle",),
    "model": _SPECULATIVE,
    "layer_skip": ("self_speculative",),
    "sparse_self": ("self_speculative",),
    "sparse_kv": ("sparsespec",),
    "head": ("eagle", "hass", "eagle3"),
    "eagle3": ("eagle3",),
    "dflash": ("dflash",),
    "dspark": ("dspark", "dflash"),
    "lookup_head": ("prompt_lookup", "eagle", "hass", "eagle3"),
    "mixed": ("prompt_lookup", "recycle", "eagle", "hass", "eagle3", "caddtree"),
    # verifiers
    "greedy": _SPECULATIVE,
    "match": _SPECULATIVE,
    "token": _SPECULATIVE,
    "tree_greedy": ("specinfer",),
    "tree_match": ("specinfer",),
    "mss": ("specinfer",),
    "wor": ("sequoia",),
    "delta": ("eagle",),
    "tree_delta": ("eagle",),
    "kseq": ("spectr",),
    "block": ("block",),
    "typical": ("medusa",),
    # trees
    "sequoia": ("sequoia",),
    "dynamic": ("eagle2",),
    "ddtree": ("ddtree", "caddtree"),
    "p_split": ("llama_cpp",),
    "static": ("medusa", "eagle", "specinfer"),
    "sampled_iid": ("specinfer",),
    "sampled_wor": ("sequoia",),
    # predictors of active neurons, and sparse decoding
    "powerinfer": ("powerinfer",),
    "mlp": ("dejavu", "powerinfer"),
    "signbit": ("sparseinfer",),
    "gate_threshold": ("cats",),
    "sequence": ("griffin",),
    "teal": ("teal",),
}
"""Works behind each method; names of ours without a paper are in `UNPUBLISHED`."""
UNPUBLISHED = ("none", "synthetic", "scripted", "threshold", "chain", "svd", "oracle", "random", "hot")
"""Methods that have no paper of their own."""


def citation(*methods: str) -> str:
    """BibTeX for a piece of work with these methods: specsparse itself, and every paper behind them, each once.

    Methods are names of drafters, verifiers, trees or predictors, as in configs: `citation("model", "block")`.
    UserError for an unknown name, with the nearest.
    """
    keys = ["specsparse"]
    for name in methods:
        if not isinstance(name, str) or (name not in METHODS and name not in UNPUBLISHED):
            raise UserError(f"method {name!r} is unknown{nearest(str(name), [*METHODS, *UNPUBLISHED])}")
        keys += METHODS.get(name, ())
    return "\n\n".join(WORKS[key].bibtex(key) for key in dict.fromkeys(keys)) + "\n"
