"""Verifiers of other libraries as callables, and docs/certified.md: those, real mistakes, and lossless methods that
were called lossy.

* **transformers**, live: `generation.utils._speculative_sampling`, algorithm 1 of 2211.17192.
* **vLLM**, from its definition: vllm/v1/sample/rejection_sampler.py at commit 7f6fc1c.
* **llama.cpp**, the live sampler of llama-cpp-python: `common_sampler_sample_and_accept_n`.
"""

import contextlib
import ctypes
import dataclasses
import importlib
import importlib.metadata
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from specsparse.errors import UserError, pip_install
from specsparse.speculative.base import DraftKind
from specsparse.speculative.proof.cases import CORNERS, keep_top
from specsparse.speculative.proof.external import ExternalVerifier
from specsparse.speculative.proof.known_bugs import KNOWN_BUGS, at, draw, greedy, one_hot, race, residual, walk
from specsparse.speculative.proof.measured import GAMMA, VOCAB, measure_external
from specsparse.speculative.proof.results import LEVEL, POWER, Result

if TYPE_CHECKING:
    import torch

SAMPLES, VLLM_SAMPLES = 20_000, 1_000_000
"""Sequences of each case of a library that draws for itself; vLLM's noise is drawn in numpy."""


def transformers_sampling(*, uniforms: bool = True, ensemble: float | None = None) -> ExternalVerifier:
    """The `_speculative_sampling` of the installed transformers, in float32 as `generate` runs it.

    It takes logits, and draws with `torch.rand_like` and `torch.multinomial`.

    Args:
        uniforms: whether its two draws read our uniforms, or torch's global generator. Everything else is its own code.
        ensemble: its `assistant_ensemble_weight`, which is lossy by design (2604.07622).
    """
    try:
        import torch
        from transformers.generation import utils

        sampling = utils._speculative_sampling
    except (ImportError, AttributeError) as error:
        how = pip_install("transformers", "torch")
        raise UserError(f"transformers 4.37 to 5.23 and torch are needed ({error}): {how}") from error

    def verify(p, q, drafts, uniforms=None):
        K = len(drafts)
        with _draws_from(utils, uniforms) if uniforms is not None else contextlib.nullcontext():
            tokens, _ = sampling(drafts[None], q.log()[None], K, p.log()[None], assistant_ensemble_weight=ensemble)
        return tokens[0].tolist()

    if not uniforms:
        torch.manual_seed(0)
    words = ["transformers", "" if uniforms else "own draws", "" if ensemble is None else f"ensemble {ensemble:g}"]
    how = {"randomness": "uniforms" if uniforms else "own", "samples": SAMPLES, "lossless": ensemble is None}
    return ExternalVerifier(verify, name=" ".join(filter(None, words)), arrays="torch", **how)


class _TorchWithUniforms:
    """torch, but for its two draws: they read given uniforms, the last one for the token."""

    def __init__(self, torch: ModuleType, uniforms: "torch.Tensor"):
        self._torch, self._uniforms = torch, uniforms

    def __getattr__(self, name: str) -> object:
        return getattr(self._torch, name)

    def rand_like(self, like: "torch.Tensor") -> "torch.Tensor":
        return self._uniforms[: like.numel()].reshape(like.shape).to(like.dtype)

    def multinomial(self, weights: "torch.Tensor", num_samples: int) -> "torch.Tensor":
        """One token a row by inverse CDF; it refuses the weights that torch refuses."""
        if num_samples != 1 or not bool((weights.sum(dim=-1) > 0).all()):
            raise RuntimeError("probability tensor contains either inf, nan or element < 0, or sums to 0")
        cdf = weights.cumsum(dim=-1)
        below = (cdf <= self._uniforms[-1] * cdf[:, -1:]).sum(dim=-1, keepdim=True)
        last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1, keepdim=True)
        return self._torch.minimum(below, last)


@contextlib.contextmanager
def _draws_from(utils: Any, uniforms: "torch.Tensor") -> Generator[None]:
    original = utils.torch
    utils.torch = _TorchWithUniforms(original, uniforms)
    try:
        yield
    finally:
        utils.torch = original


def vllm_random(*, uniforms: bool = False, draft_probs: bool = True) -> ExternalVerifier:
    """vLLM's path of requests with a temperature.

    A draft is accepted if p/q is at least its uniform. Recovered tokens are drawn for every row at once as the largest
    of max(0, p - q) / E, or p without the draft if there is no q, by one vector E of exponential noise a request that
    all rows share; the one of the first rejected row is used. The bonus token is drawn from the last row alike, by
    noise of its own.

    Args:
        uniforms: whether tokens are drawn by inverse CDF of a uniform, in place of exponential noise. Coins and weights
            stay as they are, and the distribution can be enumerated.
        draft_probs: whether it gets the drafter's distribution; else drafts are an n-gram's, or an argmax.
    """

    def verify(p, q, drafts, randomness):
        N, K = drafts.shape
        q = q if draft_probs else one_hot(drafts, p.shape[2])
        weights = residual(p, q) if draft_probs else p[:, :K] * (1 - q)
        if uniforms:
            coins, token = randomness[:, :K], draw(weights, randomness[:, -2:][:, 0])
            bonus = draw(p[:, K:], randomness[:, -1])
        else:
            coins = randomness.random((N, K))
            token = race(weights, randomness.exponential(size=(N, p.shape[2])))
            bonus = race(p[:, K:], randomness.exponential(size=(N, p.shape[2])))
        drawn = at(q, drafts)
        accept = (drawn > 0) & (at(p, drafts) / np.where(drawn > 0, drawn, 1) >= coins)
        return walk(drafts, accept, np.concatenate([token, bonus], axis=1))

    name = f"vLLM random{'' if draft_probs else ' without draft_probs'}{', inverse CDF' if uniforms else ''}"
    kind = DraftKind.SAMPLED if draft_probs else DraftKind.ONE_HOT
    how: dict[str, Any] = {"randomness": "uniforms"}
    if not uniforms:
        how = {"randomness": "generator", "samples": VLLM_SAMPLES}
    return ExternalVerifier(verify, name=name, batched=True, drafts=kind, **how)


def vllm_greedy() -> ExternalVerifier:
    """vLLM's path of requests at temperature 0: drafts are compared with the target's argmax, which is emitted."""
    return ExternalVerifier(greedy, name="vLLM greedy", batched=True, randomness="uniforms", greedy=True)


def llama_cpp_match(*, top_k: int = 0) -> ExternalVerifier:
    """llama.cpp's rule, by samples.

    At each row the sampler chain draws a token from the target's logits, which is emitted; the drafts go on as long as
    it is the draft. The C++ function is not in the library's C interface: the loop is ours, the draws are live, of one
    seed for all rounds as in a server's slot. With `top_k` the distribution to keep is p's top k.
    """
    try:
        lib = importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(f"llama-cpp-python is needed ({error}): {pip_install('llama-cpp-python')}") from error
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    if top_k:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_k(top_k))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(1))

    def verify(p, q, drafts):
        emitted = []
        for row, draft in zip(p, [*drafts.tolist(), -1]):
            with np.errstate(divide="ignore"):
                logits = np.log(row).tolist()
            data = (lib.llama_token_data * len(row))(*((i, x, 0.0) for i, x in enumerate(logits)))
            several = lib.llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False)
            lib.llama_sampler_apply(chain, ctypes.byref(several))
            emitted.append(int(several.data[several.selected].id))
            if emitted[-1] != draft:
                break
        return emitted

    weakref.finalize(verify, lib.llama_sampler_free, chain)
    name = f"llama.cpp sample and match{f', top-k {top_k}' if top_k else ''}"
    how = {"randomness": "own", "samples": SAMPLES, "target_transform": keep_top(top_k) if top_k else None}
    return ExternalVerifier(verify, name=name, dtype="float32", **how)


# -- the page --


@dataclasses.dataclass(frozen=True)
class Library:
    how: Callable[[], ExternalVerifier]  # makes the callable
    package: str  # its version is on the page; empty for one that is written from a definition
    about: str  # one line on it
    gamma: int = GAMMA  # longest draft


LIBRARIES = (
    Library(transformers_sampling, "transformers", "live, float32, its two draws read our uniforms"),
    Library(lambda: transformers_sampling(uniforms=False), "transformers", "live, with torch's own draws"),
    Library(
        lambda: transformers_sampling(ensemble=0.5), "transformers",
        "live, `assistant_ensemble_weight=0.5`: lossy by design; one draft", gamma=1,
    ),
    Library(lambda: vllm_random(uniforms=True), "", "coins and weights; tokens by inverse CDF"),
    Library(vllm_random, "", "with its exponential noise, one vector for all rows of a request"),
    Library(lambda: vllm_random(draft_probs=False), "", "n-gram or argmax drafts: no q"),
    Library(vllm_greedy, "", "temperature 0: argmax compared"),
    Library(llama_cpp_match, "llama-cpp-python", "live sampler, the loop of `sample_and_accept_n` ours"),
    Library(lambda: llama_cpp_match(top_k=2), "llama-cpp-python", "the same behind its top-k sampler"),
)  # fmt: skip
"""The other libraries' verifiers on the page."""


def page(*, date: str, progress: Callable[[str], None]) -> str:
    """The whole page in Markdown, measured at this date; minutes. `progress` gets the name of the next verifier."""
    rows = []
    for library in LIBRARIES:
        how = library.how()
        progress(how.name)
        rows.append(library_row(library, how, measure_external(how, vocab=VOCAB, gamma=library.gamma, seed=0), date))
    progress("known bugs")
    return "\n".join([INTRODUCTION, *table(LIBRARY_HEAD, rows), "", *known_bug_tables()]) + "\n"


def known_bug_tables(names: Iterable[str] = tuple(KNOWN_BUGS)) -> list[str]:
    """The tables of mistakes and of lossless methods that were called lossy, in lines of Markdown."""
    wrong, right = [], []
    for bug in (KNOWN_BUGS[name] for name in names):
        results = bug.measure()
        worst = max(results, key=lambda r: r.tv)
        links = [f"[{r}](https://github.com/{r.partition('#')[0]}/issues/{r.partition('#')[2]})" for r in bug.reports]
        common = f"`{bug.how.name}`", bug.about, ", ".join(links) or "no report known: one slip away", _kind(worst)
        if bug.how.lossless:
            right.append((*common, _size(worst), f"{worst.bound:.0e}"))
        else:
            plain = max((r for r in results if r.corner.startswith("random")), key=lambda r: r.tv)
            wrong.append((*common, _size(plain), _size(worst), worst.corner))
    return [MISTAKES, *table(WRONG_HEAD, wrong), "", NO_LOSS, *table(RIGHT_HEAD, right)]


INTRODUCTION = f"""# Certified

Made by `.venv/bin/python experiments/certified.py docs/certified.md` (transformers, torch and llama-cpp-python must be
installed). How a callable is certified, and how to certify yours, is in [verifiers.md](verifiers.md). Every case has
{VOCAB} tokens and drafts of 0 to {GAMMA}, on {len(CORNERS)} corners (random distributions, p = q, truncations that
differ, supports that never meet, ties, one-hot distributions ..), and the text of several rounds. Nothing is said of
longer drafts or more tokens.

* **exact**: every draft enumerated, every uniform bisected. The total variation (TV) is that of the distribution
  itself; the bound is what rounding may explain. Points drawn anew show a window of one uniform in which a quarter of
  verdicts are wrong from a width of 1e-3 on, and far narrower ones near a threshold.
* **sampled**: the frequencies of n texts. TV and bound are those of samples; *would find* is the true total variation
  that would have been found with {POWER:.0%}, at a level of {LEVEL:.0e} for all cases of a row.

## Verifiers of other libraries

The rule is certified, on distributions that it is given. Whether a library gives it the right distributions is
another question: see the mistakes below.
"""

MISTAKES = """## Mistakes, by their public reports

Each is a callable written from what the report says, on small random distributions: nobody's code, and not the sizes
that a real model would show. All are caught.
"""

NO_LOSS = """## Called lossy, or a loss of another kind, and lossless

In the linked threads somebody says that these change the output distribution, asks whether they do, or answers that
they do not. They do not: what they lose is acceptance. `greedy_at_0` is about texts that differ at temperature 0: the
rule is exact, so it is the logits that differ between one row and several (`python -m specsparse audit` measures that).
"""

LIBRARY_HEAD = ("verifier", "what", "version", "certificate", "TV, worst case", "bound", "would find", "lossless")
WRONG_HEAD = ("name", "mistake", "reported in", "certificate", "TV on random distributions", "worst case", "on")
RIGHT_HEAD = ("name", "what it does", "see", "certificate", "TV, worst case", "bound")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def library_row(library: Library, how: ExternalVerifier, results: Sequence[Result], date: str) -> tuple[str, ...]:
    worst, version = max(results, key=lambda r: r.tv), "definition of commit 7f6fc1c"
    if package := library.package:
        version = f"{package} {importlib.metadata.version(package)}"  # its verifier was imported before
    promise = "as designed, no" if not how.lossless else "yes" if all(r.holds for r in results) else "**NO**"
    finds = f"{worst.power.finds:.3f}" if worst.power else ""
    numbers = _kind(worst), _size(worst), f"{worst.bound:.0e}", finds
    return how.name, library.about, f"{version}, {date}", *numbers, promise


def _kind(result: Result) -> str:
    return "exact" if result.power is None else f"sampled, n = {result.power.samples:,}"


def _size(result: Result) -> str:
    return f"{result.tv:.3f}" if result.tv >= 0.001 else f"{result.tv:.0e}"
