"""Counters first, then rates, by one function; every rate has its definition beside it.

p is the target's distribution, q the draft's. Mean acceptance length includes the bonus token (Leviathan et al. 2023).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Times:
    """Wall seconds. A stage is None if it was not measured: the loop in one program knows only the total.

    `prefill` is apart: `total` is the decoding time without it.
    """

    prefill: float = 0.0
    draft: float | None = None
    verify: float | None = None
    sample: float | None = None
    commit: float | None = None
    host: float | None = None
    total: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        """Stage by stage; None if one side spent time and did not measure the stage."""
        stages = {}
        for name in STAGES:
            known = [getattr(t, name) for t in (self, other) if t.total or getattr(t, name) is not None]
            stages[name] = None if not known or None in known else sum(known)
        return Times(prefill=self.prefill + other.prefill, total=self.total + other.total, **stages)

    def share(self, decode: float, prefill: float) -> "Times":
        """The share `decode` of each stage and of the total, and the share `prefill` of the prefill."""
        stages = {name: None if (t := getattr(self, name)) is None else decode * t for name in STAGES}
        return Times(prefill=prefill * self.prefill, total=decode * self.total, **stages)


STAGES = ("draft", "verify", "sample", "commit", "host")
"""Of a round, in order."""


@dataclass
class Counters:
    """What happened in a run (speculative.md, section 1). Counters of two runs add up.

    num_rounds: rounds of the loop (one forward of the target each, after the prompt's)
    num_drafts: rounds with a non-empty draft
    num_draft_tokens: drafted tokens
    num_tested: drafted positions up to and including the first rejection
    num_accepted_tokens: drafted tokens that stayed
    num_accepted_tokens_per_pos: the same by position in the draft, 0 first
    num_emitted_tokens: tokens given to the user (all come from rounds: the prompt's last token is fed by the first)
    target_passes: forwards of the target, the prompt's chunks included
    alpha: sum over tested positions of the verifier's acceptance probability before the token is known
    alpha_var: sum of alpha_i (1 - alpha_i) over the same positions
    num_alpha_tested: the tested positions at which alpha was measured; 0 under verifiers without alpha
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_tested: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_emitted_tokens: int = 0
    target_passes: int = 0
    times: Times = field(default_factory=Times)
    alpha: float = 0.0
    alpha_var: float = 0.0
    num_alpha_tested: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        """The counters of both runs together; the shorter list of positions is padded with zeros."""
        if not isinstance(other, Counters):
            return NotImplemented
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)}
        mine, theirs = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        width = max(len(mine), len(theirs))
        mine, theirs = (tuple(v) + (0,) * (width - len(v)) for v in (mine, theirs))
        sums["num_accepted_tokens_per_pos"] = tuple(a + b for a, b in zip(mine, theirs, strict=True))
        return Counters(**sums)

    def validate(self) -> None:
        """Raises ValueError if a counter contradicts another one."""
        per_pos = self.num_accepted_tokens_per_pos
        checks = {
            "accepted <= tested <= drafted": self.num_accepted_tokens <= self.num_tested <= self.num_draft_tokens,
            "alpha is of tested positions": self.num_alpha_tested <= self.num_tested,
            "drafts <= rounds": self.num_drafts <= self.num_rounds,
            "accepted per position sums to accepted": sum(per_pos) == self.num_accepted_tokens,
            "accepted per position does not rise": all(a >= b for a, b in itertools.pairwise(per_pos)),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise ValueError(f"counters break {'; '.join(broken)}: {self}")


DEFINITIONS: dict[str, str] = {
    "mean_acceptance_length": "1 + accepted / drafts (bonus token included)",
    "tokens_per_target_pass": "emitted / rounds",
    "draft_acceptance_rate": "accepted / drafted tokens",
    "acceptance_per_position": "accepted at the position / drafts",
    "conditional_acceptance_per_position": "accepted at the position / accepted at the one before it",
    "alpha": "mean over tested positions of the verifier's acceptance probability (chains; not greedy, block)",
    "realised_alpha": "accepted / tested positions",
    "alpha_z": "(accepted - sum alpha_i) / sqrt(sum alpha_i (1 - alpha_i)); beyond 4 something is wrong",
    "draws_z": "alpha_z of each prompt's first pass, since repeats draw the same; null if little was tested",
    "tokens_per_second": "emitted / decode time (prompt excluded)",
    "share_draft": "draft time / decode time",
    "share_verify": "verify time / decode time",
    "share_sample": "distributions, verdict and sampling time / decode time",
    "share_commit": "cache commit and bookkeeping time / decode time",
    "share_rest": "everything but draft and verify / decode time",
    "speedup_ratio_of_totals": "sum of plain seconds / sum of speculative seconds, scaled to as many tokens",
    "speedup_low": "lower end of the 95 % interval of speedup_ratio_of_totals over prompts, repeats of a prompt summed",
    "speedup_high": "its upper end; null for fewer than three prompts",
    "speedup_mean_of_ratios": "mean over prompts and repeats of plain / speculative seconds per token; has no interval",
    "speedup_geometric_mean": "geometric mean over prompts of a prompt's plain / speculative seconds, repeats summed",
    "speedup_geometric_low": "lower end of the 95 % interval of speedup_geometric_mean over prompts (t, of the logs)",
    "speedup_geometric_high": "its upper end; null for fewer than three prompts",
    "speedup_timing_low": "lower end of the 95 % interval of speedup_ratio_of_totals over repeats of the same prompts",
    "speedup_timing_high": "its upper end: timing noise alone; null if a prompt has one repeat",
    "speedup_skewed": "whether a few prompts differ so much from the rest that low and high may not be believed",
}


def lengths_note(*, per_pass: str = "tokens per target pass", length: str = "mean acceptance length") -> str:
    """The footnote of a table with both, by the names that they have there."""
    return f"{per_pass}: emitted tokens / all rounds; {length}: 1 + accepted tokens / rounds that drafted"


def figures(counters: Counters, seconds: float) -> str:
    """A line for a terminal: tokens, their rate in so many seconds of decoding, and the acceptance of the drafts."""
    tokens = counters.num_emitted_tokens
    rate = tokens / seconds if seconds else 0.0
    text = f"{tokens} tokens" + (f", {rate:.{0 if rate >= 10 else 2}f} tok/s" if rate else "")
    if counters.num_draft_tokens:
        share = counters.num_accepted_tokens / counters.num_draft_tokens
        text += f", {tokens / counters.num_rounds:.2f} tokens a target pass, {share:.0%} of the drafted ones kept"
    return text


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def rates(counters: Counters) -> dict[str, Any]:
    """Every rate that `counters` determine, by the names of `DEFINITIONS`; None if the denominator is zero.

    Time shares are None if the stages were not measured. Of one sequence of a batch, whose times are its share of
    the batch's, tokens a second are the batch's, were all its sequences like this one.
    """
    c, t = counters, counters.times
    per_pos = c.num_accepted_tokens_per_pos
    reached = (c.num_drafts, *per_pos)
    drafted = _ratio(c.num_accepted_tokens, c.num_drafts)
    split = bool(t.total) and bool(t.draft or t.verify)

    def share(seconds: float | None) -> float | None:
        return seconds / t.total if split and seconds is not None else None

    return {
        "mean_acceptance_length": None if drafted is None else 1 + drafted,
        "tokens_per_target_pass": _ratio(c.num_emitted_tokens, c.num_rounds),
        "draft_acceptance_rate": _ratio(c.num_accepted_tokens, c.num_draft_tokens),
        "acceptance_per_position": [_ratio(a, c.num_drafts) for a in per_pos],
        "conditional_acceptance_per_position": [_ratio(a, b) for a, b in zip(per_pos, reached, strict=False)],
        "alpha": _ratio(c.alpha, c.num_alpha_tested),
        "realised_alpha": _ratio(c.num_accepted_tokens, c.num_tested),
        "alpha_z": _ratio(c.num_accepted_tokens - c.alpha, max(c.alpha_var, 0.0) ** 0.5),
        "tokens_per_second": _ratio(c.num_emitted_tokens, t.total),
        "share_draft": share(t.draft),
        "share_verify": share(t.verify),
        "share_sample": share(t.sample),
        "share_commit": share(t.commit),
        "share_rest": share(t.total - (t.draft or 0.0) - (t.verify or 0.0)),
    }


_LEAST_VARIANCE = 5.0
"""Of accepted tokens: under it they are too rare for a z to say much (one acceptance at alpha 0.001 has z = 30)."""


def draws_z(once: Iterable[Counters]) -> float | None:
    """`alpha_z` of passes that share no noise, or None if they tested too little."""
    total = sum(once, Counters())
    return rates(total)["alpha_z"] if total.alpha_var >= _LEAST_VARIANCE else None


def draws_doubts(found: Iterable[tuple[str, float | None]]) -> tuple[str, ...]:
    """A line to warn with for each `draws_z` beyond 4, by the name of what it is of ("" for the whole)."""
    return tuple(
        f"{name}{': ' * bool(name)}alpha_z is {z:+.1f}, beyond 4: tokens are accepted {'more' if z > 0 else 'less'} "
        "often than the recorded p and q imply, so the text may not have the target's distribution; "
        "specsparse.testing.check_drafter tests the draws of a drafter, specsparse.certify a verifier"
        for name, z in found
        if z is not None and abs(z) > 4
    )


STYLES = ("llama.cpp", "sglang", "spec-bench")
"""Other projects whose definitions `export` knows."""


def export(counters: Counters, style: str, *, tree: bool = False) -> dict[str, float | None]:
    """The counters as another project of `STYLES` defines and names them (`accept` of llama.cpp is in percent); None if
    the counters do not tell a figure. `tree`: the drafts branched. ValueError: another style."""
    c = counters
    per_round = _ratio(c.num_emitted_tokens, c.num_rounds)
    if style == "llama.cpp":  # counts the levels that a tree came to, which nodes do not tell
        drafted = None if tree else c.num_draft_tokens
        accept = 100 * c.num_accepted_tokens / drafted if drafted else None
        emitted, accepted = c.num_emitted_tokens, c.num_accepted_tokens
        return {"n_predict": emitted, "n_drafted": drafted, "n_accept": accepted, "accept": accept}
    if style == "sglang":  # the bonus token stands in the numerator of both
        rate = _ratio(c.num_emitted_tokens, c.num_draft_tokens)
        return {"spec_verify_ct": c.num_rounds, "accept_length": per_round, "accept_rate": rate}
    if style == "spec-bench":  # the prompt's time counts
        seconds = c.times.prefill + c.times.total
        return {"mean_accepted_tokens": per_round, "tokens_per_second": _ratio(c.num_emitted_tokens, seconds)}
    raise ValueError(f"style={style!r} must be one of {', '.join(STYLES)}")


def to_dict(counters: Counters) -> dict[str, Any]:
    return dataclasses.asdict(counters)


def from_dict(values: Mapping[str, Any]) -> Counters:
    """The inverse of `to_dict`. Older records do not count how often alpha was measured: an alpha of 0 was not."""
    per_pos = tuple(values.get("num_accepted_tokens_per_pos", ()))
    times: dict[str, Any] = dict(values.get("times", {}))
    if not any(times.get(name) for name in STAGES):
        times |= dict.fromkeys(STAGES)  # older records wrote 0 for what was not measured
    measured = values.get("num_tested", 0) if values.get("alpha") else 0
    given: dict[str, Any] = {"num_alpha_tested": measured, **values}
    return Counters(**given | {"num_accepted_tokens_per_pos": per_pos, "times": Times(**times)})
