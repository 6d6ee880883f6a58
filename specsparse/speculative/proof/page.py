"""The page docs/certified.md: verifiers of other libraries, real mistakes, and what was wrongly called lossy."""

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterable, Sequence

from specsparse.errors import UserError
from specsparse.speculative.proof.adapters import hugging_face, llama_cpp, vllm
from specsparse.speculative.proof.cases import CORNERS
from specsparse.speculative.proof.chain_probs import LEVEL, POWER
from specsparse.speculative.proof.external import ExternalVerifier
from specsparse.speculative.proof.known_bugs import KNOWN_BUGS, Exhibit, measure_exhibit
from specsparse.speculative.proof.measured import measure_external
from specsparse.speculative.proof.results import CALLABLE, Result

VOCAB, GAMMA = 3, 2


@dataclasses.dataclass(frozen=True)
class Library:
    """A verifier of another library.

    Attributes:
        how: makes the callable.
        package: whose version stands beside it; empty for one that is written from a definition.
        what: one line on it.
        gamma: longest draft.
    """

    how: Callable[[], ExternalVerifier]
    package: str
    what: str
    gamma: int = GAMMA


ENGINES = (
    Library(hugging_face.speculative_sampling, "transformers", "live, float32, its two draws read our uniforms"),
    Library(lambda: hugging_face.speculative_sampling(uniforms=False), "transformers", "live, with torch's own draws"),
    Library(
        lambda: hugging_face.speculative_sampling(ensemble=0.5), "transformers",
        "live, `assistant_ensemble_weight=0.5`: lossy by design; one draft", gamma=1,
    ),
    Library(lambda: vllm.random(uniforms=True), "", "coins and weights; tokens by inverse CDF"),
    Library(vllm.random, "", "with its exponential noise, one vector for all rows of a request"),
    Library(lambda: vllm.random(draft_probs=False), "", "n-gram or argmax drafts: no q"),
    Library(vllm.at_zero, "", "temperature 0: argmax compared"),
    Library(llama_cpp.sample_and_match, "llama-cpp-python", "live sampler, the loop of `sample_and_accept_n` ours"),
    Library(lambda: llama_cpp.sample_and_match(top_k=2), "llama-cpp-python", "the same behind its top-k sampler"),
)  # fmt: skip
"""What the page certifies of others."""


def page(
    *, date: str, engines: Sequence[Library] = ENGINES, progress: Callable[[str], None] = lambda name: None
) -> str:
    """The whole page in Markdown; minutes.

    Args:
        date: of the measurement.
        engines: of other libraries.
        progress: is told what is certified next.

    Raises:
        UserError: a library that is to be certified is not installed.
    """
    rows = []
    for engine in engines:
        how = engine.how()
        progress(how.name)
        rows.append(engine_row(engine, how, measure_external(how, vocab=VOCAB, gamma=engine.gamma, seed=0), date))
    progress("the museum")
    return "\n".join([INTRODUCTION, *table(ENGINE_HEAD, rows), "", *known_bug_tables()]) + "\n"


def known_bug_tables(names: Iterable[str] = tuple(KNOWN_BUGS)) -> list[str]:
    """The tables of mistakes and of what is none, in lines of Markdown."""
    wrong, right = [], []
    for exhibit in (KNOWN_BUGS[name] for name in names):
        results = measure_exhibit(exhibit.name, vocab=VOCAB, gamma=GAMMA)
        (right if exhibit.how.lossless else wrong).append(exhibit_row(exhibit, results))
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

The rule is certified, on distributions that are handed over. Whether a library hands it the right distributions is
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

ENGINE_HEAD = ("verifier", "what", "version", "certificate", "TV, worst case", "bound", "would find", "lossless")
WRONG_HEAD = ("name", "mistake", "reported in", "certificate", "TV on random distributions", "worst case", "on")
RIGHT_HEAD = ("name", "what it does", "see", "certificate", "TV, worst case", "bound")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def engine_row(engine: Library, how: ExternalVerifier, results: Sequence[Result], date: str) -> tuple[str, ...]:
    """A row of the first table."""
    worst = max(results, key=lambda r: r.tv)
    version = f"{engine.package} {_version(engine.package)}, {date}" if engine.package else f"{vllm.VERSION}, {date}"
    promise = "as designed, no" if not how.lossless else "yes" if all(r.holds for r in results) else "**NO**"
    finds = f"{worst.power.finds:.3f}" if worst.power else ""
    return how.name, engine.what, version, _kind(worst), _size(worst), f"{worst.bound:.0e}", finds, promise


def exhibit_row(exhibit: Exhibit, results: Sequence[Result]) -> tuple[str, ...]:
    """A row of one of the other two tables."""
    worst = max(results, key=lambda r: r.tv)
    plain = max((r for r in results if r.corner.startswith("random")), key=lambda r: r.tv)
    seen = ", ".join(_link(report) for report in exhibit.reports) or "no report known: one slip away"
    if exhibit.how.lossless:
        return f"`{exhibit.name}`", exhibit.what, seen, _kind(worst), _size(worst), f"{worst.bound:.0e}"
    return f"`{exhibit.name}`", exhibit.what, seen, _kind(worst), _size(plain), _size(worst), worst.corner


def _kind(result: Result) -> str:
    return "exact" if result.part == CALLABLE else f"sampled, n = {result.power.samples:,}"


def _size(result: Result) -> str:
    return f"{result.tv:.3f}" if result.tv >= 0.001 else f"{result.tv:.0e}"


def _link(report: str) -> str:
    repository, _, number = report.partition("#")
    return f"[{report}](https://github.com/{repository}/issues/{number})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"{package} is not installed: pip install {package}") from error
