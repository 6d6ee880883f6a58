"""What vLLM, Hugging Face and llama.cpp call things, and what they are called here: one table for all entries.

`generate`, `load`, the command line, configs and the server look words up in `WORDS`. A word for a thing that we have
is understood or answered with our name. Any other one has a line that says what there is instead.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from specsparse.errors import UserError, refuse
from specsparse.support.options import nearest, shown
from specsparse.support.registry import Choice

VLLM, HF, LLAMA = "vLLM", "Hugging Face", "llama.cpp"


class Word(NamedTuple):
    whose: tuple[str, ...]  # the projects that use it
    # its name here: `sampling.FIELD` of `SamplingParams`, `load.OPTION` of `specsparse.load`, `drafter.OPTION`, an
    # argument of `generate`, or "" if there is no such thing
    here: str = ""
    line: str = ""  # the next step, for a word that is no other name of a value


_GUIDED = "the answer is free text here; allowed_token_ids limits its tokens, in Python also logits_processors"
_TOOLS = "no calls of tools are read from an answer; describe them in the system message"
_TEMPLATE = "the prompt is model.tokenizer.apply_chat_template(messages, chat_template_kwargs={NAME: VALUE})"
_BEAMS = "there is no beam search; best_of keeps the most likely of several samples"
_TOKENIZER = "leave it out: the model's file has its tokenizer"
_CHUNKS = "leave it out: prompts are read in chunks of 32, 128 or 512 tokens"
_SPLIT = (
    "a device holds all layers; load(placement=FILE, devices=2) keeps hot neurons on one and the others on a second"
)

WORDS: Mapping[str, Word] = {
    # How tokens are chosen, and when a text ends.
    "sampling_params": Word((VLLM,), "sampling"),
    "max_new_tokens": Word((HF,), "sampling.max_tokens"),
    "max_completion_tokens": Word((VLLM,), "sampling.max_tokens"),
    "n_predict": Word((LLAMA,), "sampling.max_tokens"),
    "num_predict": Word((LLAMA,), "sampling.max_tokens"),
    "min_new_tokens": Word((HF,), "sampling.min_tokens"),
    "num_return_sequences": Word((HF,), "sampling.n"),
    "temp": Word((LLAMA,), "sampling.temperature"),
    "repeat_penalty": Word((LLAMA,), "sampling.repetition_penalty"),
    "stop_strings": Word((HF,), "sampling.stop"),
    "reverse_prompt": Word((LLAMA,), "sampling.stop"),
    "eos_token_id": Word((HF,), line="stop_token_ids=[ID, ..] ends a text at other tokens than the model's own"),
    "n_probs": Word((LLAMA,), "sampling.logprobs"),
    "do_sample": Word((HF,), line="temperature=0 is greedy decoding, any other temperature samples"),
    "max_length": Word((HF,), line="it counts the prompt; here it is max_tokens=N, which does not"),
    "num_beams": Word((HF,), line=_BEAMS),
    "use_beam_search": Word((VLLM,), line=_BEAMS),
    "length_penalty": Word((VLLM, HF), line=_BEAMS),
    "early_stopping": Word((VLLM, HF), line=_BEAMS),
    "bad_words_ids": Word((HF,), line="here it is bad_words=[TEXT, ..]"),
    "sequence_bias": Word((HF,), line="logit_bias={ID: BIAS} is for single tokens"),
    "logits_processor": Word((HF,), line="here it is logits_processors=[f], jax functions f(ids, logits) -> logits"),
    "stopping_criteria": Word((HF,), line="stop=[TEXT, ..] and stop_token_ids=[ID, ..] end a text"),
    "generation_config": Word((HF,), line="give its fields by name, such as max_new_tokens=64, temperature=0.8"),
    "streamer": Word((HF,), line="specsparse.stream(model, prompt) gives the text as it comes"),
    "tokenizer": Word((HF, VLLM), line=_TOKENIZER),
    "assistant_tokenizer": Word((HF,), line=_TOKENIZER),
    "attention_mask": Word((HF,), line="leave it out: a list of prompts of any lengths is a batch"),
    "input_ids": Word((HF,), line="the prompt is the second argument: a text, token ids or a chat"),
    "prompt_token_ids": Word((VLLM,), line="the prompt is the second argument: a text, token ids or a chat"),
    "output_scores": Word((HF,), line="here it is logprobs=N"),
    "return_dict_in_generate": Word((HF,), line="leave it out: a Generation always has text, ids and counters"),
    "use_cache": Word((HF,), line="leave it out: keys and values are always kept"),
    "past_key_values": Word((HF,), line="here it is prefix_cache=PrefixCache(), handed to each call"),
    "enable_prefix_caching": Word((VLLM,), line="here it is prefix_cache=PrefixCache(), handed to each call"),
    "cache_prompt": Word((LLAMA,), line="here it is prefix_cache=PrefixCache(), handed to each call"),
    "no_repeat_ngram_size": Word((HF,), line="repetition_penalty and bad_words keep a text from repeating itself"),
    "typical_p": Word((HF, LLAMA), line="temperature, top_k, top_p and min_p choose tokens here"),
    "mirostat": Word((LLAMA,), line="temperature, top_k, top_p and min_p choose tokens here"),
    "tools": Word((VLLM, HF), line=_TOOLS),
    "tool_choice": Word((VLLM,), line=_TOOLS),
    "chat_template_kwargs": Word((VLLM,), line=_TEMPLATE),
    "response_format": Word((VLLM,), line=_GUIDED),
    "structured_outputs": Word((VLLM,), line=_GUIDED),
    "guided_decoding": Word((VLLM,), line=_GUIDED),
    "guided_json": Word((VLLM,), line=_GUIDED),
    "guided_regex": Word((VLLM,), line=_GUIDED),
    "guided_choice": Word((VLLM,), line=_GUIDED),
    "guided_grammar": Word((VLLM,), line=_GUIDED),
    "grammar": Word((LLAMA,), line=_GUIDED),
    "json_schema": Word((LLAMA,), line=_GUIDED),
    "system_prompt": Word((LLAMA,), line="it is --system TEXT, and {'role': 'system', ..} of a chat in Python"),
    "conversation": Word((LLAMA,), line="python -m specsparse chat is the conversation"),
    "lora_request": Word((VLLM,), line="merge the adapter into the model's file first"),
    "lora": Word((LLAMA,), line="merge the adapter into the model's file first"),
    "use_tqdm": Word((VLLM,), line="leave it out: generate shows no bar"),
    # Who drafts, and how much.
    "speculative_config": Word((VLLM,), "drafter", "here it is drafter=NAME with its options, such as gamma=4"),
    "assistant_model": Word((HF,), "drafter.model"),
    "model_draft": Word((LLAMA,), "drafter.model"),
    "spec_draft_model": Word((LLAMA,), "drafter.model"),
    "assistant_early_exit": Word((HF,), line="here it is drafter=specsparse.get_drafter('layer_skip')"),
    "num_speculative_tokens": Word((VLLM,), "drafter.gamma"),
    "num_assistant_tokens": Word((HF,), "drafter.gamma"),
    "prompt_lookup_num_tokens": Word((HF,), "drafter.gamma"),
    "gamma": Word((), "drafter.gamma"),
    "draft_max": Word((LLAMA,), "drafter.gamma"),
    "draft": Word((LLAMA,), "drafter.gamma"),
    "n_draft": Word((LLAMA,), "drafter.gamma"),
    "spec_draft_n_max": Word((LLAMA,), "drafter.gamma"),
    "draft_min": Word((LLAMA,), "drafter.n_min"),
    "spec_draft_n_min": Word((LLAMA,), "drafter.n_min"),
    "draft_p_min": Word((LLAMA,), "drafter.p_min"),
    "spec_draft_p_min": Word((LLAMA,), "drafter.p_min"),
    "spec_type": Word((LLAMA,), "drafter"),
    "max_matching_ngram_size": Word((HF,), "drafter.ngram_max"),
    "prompt_lookup_max": Word((VLLM,), "drafter.ngram_max"),
    "prompt_lookup_min": Word((VLLM,), "drafter.ngram_min"),
    "num_assistant_tokens_schedule": Word((HF,), line="policy='fixed' is constant, policy='heuristic' is heuristic"),
    "assistant_confidence_threshold": Word((HF,), line="policy='confidence' ends a draft that is not sure"),
    "disable_by_batch_size": Word((VLLM,), line="policy='auto_off' leaves out drafts that do not pay"),
    "draft_tensor_parallel_size": Word((VLLM,), line="leave it out: the draft model lies whole on each device"),
    # How a model is loaded.
    "max_model_len": Word((VLLM,), "load.context_length"),
    "n_ctx": Word((LLAMA,), "load.context_length"),
    "ctx_size": Word((LLAMA,), "load.context_length"),
    "context_length": Word((), "load.context_length"),
    "n_threads": Word((LLAMA,), "load.threads"),
    "threads": Word((LLAMA,), "load.threads"),
    "kv_cache_dtype": Word((VLLM,), "load.kv_dtype"),
    "cache_type_k": Word((LLAMA,), "load.kv_dtype"),
    "cache_type_v": Word((LLAMA,), line="keys and values have one type: kv_dtype, --kv-dtype TYPE"),
    "threads_batch": Word((LLAMA,), line="leave it out: the threads are those of prompts, too"),
    "tensor_parallel_size": Word((VLLM,), "load.mesh"),
    "rope_freq_base": Word((LLAMA,), "load.rope_base"),
    "n_gpu_layers": Word((LLAMA,), line=_SPLIT),
    "gpu_layers": Word((LLAMA,), line=_SPLIT),
    "device_map": Word((HF,), line=_SPLIT),
    "gpu_memory_utilization": Word((VLLM,), line="leave it out: the cache is as long as each text needs"),
    "torch_dtype": Word((HF,), line="a file's own types are kept; float_weights=True computes in float32"),
    "dtype": Word((HF, VLLM), line="a file's own types are kept; float_weights=True computes in float32"),
    "quantization": Word((VLLM,), line="the GGUF file says it; python -m specsparse convert makes one of another type"),
    "trust_remote_code": Word((HF, VLLM), line="leave it out: a file of weights holds no code"),
    "flash_attn": Word((LLAMA,), line="leave it out: there is one attention for each device"),
    "no_mmap": Word((LLAMA,), line="leave it out: a file is read once, and its weights are packed into memory"),
    "mlock": Word((LLAMA,), line="leave it out: a file is read once, and its weights are packed into memory"),
    "parallel": Word((LLAMA,), line="leave it out: a list of prompts is decoded in one batch"),
    "batch_size": Word((LLAMA,), line=_CHUNKS),
    "ubatch_size": Word((LLAMA,), line=_CHUNKS),
}

METHODS = {
    "ngram": "prompt_lookup",
    "ngram_gpu": "prompt_lookup",
    "ngram-simple": "ngram_simple",
    "ngram-map-k": "ngram_map",
    "draft_model": "model",
    "draft-simple": "model",
    "draft-eagle3": "eagle3",
    "draft-dflash": "dflash",
    "draft-dspark": "dspark",
    "layer-skip": "layer_skip",
    "eagle": "head",
}
"""Neighbours' names of drafters whose own name is another: vLLM's methods and llama.cpp's --spec-type."""
FLAGS = {
    "-ngl": "n_gpu_layers", "-fa": "flash_attn", "-np": "parallel", "-b": "batch_size", "-ub": "ubatch_size",
    "-ctk": "cache_type_k", "-ctv": "cache_type_v", "-tb": "threads_batch", "-cnv": "conversation",
    "-sys": "system_prompt",
}  # fmt: skip
"""Short flags of llama.cpp that are answered by their long words."""
SPECULATIVE_METHODS = ("ngram", "draft_model", "suffix", "eagle", "eagle3", "dflash", "dspark")
"""Methods of vLLM's `speculative_config` that we have."""
DRAFT_FILES = {"model": "model", "head": "head", "eagle3": "path", "dflash": "path", "dspark": "path"}
"""The option of each drafter that names its file: vLLM's key `model`, llama.cpp's -md."""
_PLACES = {
    "python": {
        "drafter": "it belongs to the drafter: drafter=specsparse.get_drafter(NAME, {}=VALUE)",
        "load": "it belongs to the model: specsparse.load(FILE, {}=VALUE)",
    },
    "command": {
        "sampling": "here it is --{}",
        "drafter": "here it is --option {}=VALUE",
        "load": "it belongs to the model: -c, -t, --kv-dtype, --mesh and --kernels say how it is loaded",
    },
    "server": {
        "drafter": "it belongs to the server's drafter: serve MODEL --drafter NAME --option {}=VALUE",
        "load": "it belongs to the server's model",
    },
}


def answer(name: str, *, at: str = "python") -> str:
    """Our word for a neighbour's, in Python, in a "command" or at the "server"; "" for a word that is in no table."""
    word = WORDS.get(name)
    if word is None:
        return ""
    owner, _, own = word.here.rpartition(".")
    return word.line or _PLACES[at].get(owner, "here it is {}").format(own)


def hint(name: str, valid: Iterable[str]) -> str:
    """The end of a message about an unknown name: our word for it, the nearest name, or all names."""
    said = answer(name)
    return f"; {said}" if said else nearest(name, valid)


def sampling_name(name: str) -> str:
    """The field of `SamplingParams` that a neighbour's word is, or the word itself."""
    owner, _, own = WORDS.get(name, Word(())).here.rpartition(".")
    return own if owner == "sampling" else name


def config_key(key: str) -> str:
    """The key of a run's config that a neighbour's word stands for, or the key itself."""
    word = WORDS.get(key)
    if word is None or word.line or not word.whose or word.here == "sampling":
        return key
    if word.here == "drafter":
        return "drafter"
    owner, _, own = word.here.rpartition(".")
    if own in ("max_tokens", "gamma"):
        return "max_tokens" if own == "max_tokens" else "policy.gamma"
    return f"{'model' if owner == 'load' else owner}.{own}"


def understood(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `specsparse.generate` from those that a neighbour's reader writes; ours stay as they are. UserError:
    a word that has no meaning here, with what there is; or one thing by two names."""
    out: dict[str, Any] = {}
    options: dict[str, Any] = {}  # of the drafter
    said: dict[str, str] = {}
    given = {name: value for name, value in given.items() if value is not None or name not in WORDS}
    if "do_sample" in given:  # False wins over a temperature
        samples = given.pop("do_sample")
        if not isinstance(samples, bool):
            raise UserError(f"do_sample={shown(samples)} must be true or false")
        if not samples:
            given = {name: value for name, value in given.items() if sampling_name(name) != "temperature"}
        if not any(name in given for name in ("temperature", "temp", "sampling", "sampling_params")) or not samples:
            given["temperature"] = float(samples)
    for name, value in given.items():
        word = WORDS.get(name, Word((), name))
        owner, _, own = word.here.rpartition(".")
        if owner == "load" or not word.here:
            raise UserError(f"{name} is no argument of generate: {answer(name)}")
        found = speculative(value) if name == "speculative_config" else {own: value}
        if twice := said.keys() & found.keys():
            raise UserError(f"{said[twice.pop()]} and {name} are one thing: give one of them")
        said |= dict.fromkeys(found, name)
        (options if owner == "drafter" else out).update(found)
    if options:
        drafter = out.get("drafter", "model" if "model" in options else "prompt_lookup")
        if not isinstance(drafter, str | Choice):
            name = said[next(iter(options))]
            raise UserError(f"{name} is no argument beside a drafter that is made: {answer(name)}")
        if "model" in options and getattr(drafter, "name", drafter) not in ("model", "draft_model"):
            raise UserError(f"{said['drafter']} and {said['model']} are one thing: give one of them")
        name, own_options = (drafter, {}) if isinstance(drafter, str) else (drafter.name, drafter.options)
        if name == "none":
            raise UserError(
                f"{said[next(iter(options))]} needs a drafter, and none is plain decoding: leave one of them out"
            )
        out["drafter"] = Choice(name, {**own_options, **options})
    return out


def speculative(config: object) -> dict[str, Any]:
    """The arguments of `specsparse.generate` for vLLM's `speculative_config`, a mapping or its JSON. UserError: a
    method, a model or a key that we do not have."""
    if isinstance(config, str):
        with contextlib.suppress(ValueError, RecursionError):
            config = json.loads(config)
    if not isinstance(config, Mapping):
        example = "{'method': 'ngram', 'num_speculative_tokens': 4}"
        raise UserError(f"speculative_config={shown(config)} must be a mapping, such as {example}")
    options = {str(key): value for key, value in config.items() if value is not None}
    model = options.pop("model", None)
    if model in ("ngram", "[ngram]"):  # vLLM's older form
        model, options["method"] = None, "ngram"
    method = options.pop("method", None if model is None else "draft_model")
    drafter, rule = METHODS.get(str(method), str(method)), options.pop("rejection_sample_method", "standard")
    wanted = f"is for {method} a file or a name" if drafter in DRAFT_FILES else f"is not for {method}, leave it out"
    name = "speculative_config"
    refuse({
        f"{name}.method={shown(method)}: give one of the methods {', '.join(SPECULATIVE_METHODS)}":
            method not in SPECULATIVE_METHODS,
        f"{name}.rejection_sample_method={shown(rule)}: give standard or block":
            rule not in ("standard", "strict", "block"),
        f"{name}.model={shown(model)}: it {wanted}":  # a target finds its own trained head
            (model is not None) != (drafter in DRAFT_FILES) and drafter != "head",
        **{f"{name}.{key}: {answer(key)}": not WORDS[key].here for key in options if key in WORDS},
    })  # fmt: skip
    files = {} if model is None else {DRAFT_FILES[drafter]: model}
    verifier = {"verifier": "block"} if rule == "block" else {}
    return {"drafter": Choice(drafter, {**files, **options}), **verifier}
