"""Acceptance over many seeds: one batch of samples of one prompt, so one compilation and one pass over the weights."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specsparse.engine.generate import Finish
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.measure import intervals
from specsparse.runtime import metrics
from specsparse.runtime.binding import make_method
from specsparse.runtime.device_batch import Request
from specsparse.runtime.metrics import Counters
from specsparse.runtime.requests import PromptLike, prompt_ids
from specsparse.runtime.results import decode
from specsparse.runtime.session import Session
from specsparse.speculative.base import Drafter, Verifier
from specsparse.speculative.drafters.plan import DrafterPlan
from specsparse.support.files import Json


@dataclass(frozen=True)
class OverSeeds:
    """Mean over seeds, its 95 % interval (Student's t; None for one seed), and the values by seed."""

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "OverSeeds":
        """Of at least one value."""
        found = intervals.mean(values)
        return cls(found.value, found.low, found.high, tuple(float(v) for v in values))


@dataclass(frozen=True)
class SeedAcceptance:
    """What many seeds accepted. Rates are defined in `runtime.metrics.DEFINITIONS`; None where no seed drafted, or none
    ran a round because the prompt fills the context.

    Attributes:
        seeds: one sequence each.
        tokens_per_target_pass, mean_acceptance_length, realised_alpha: over seeds.
        acceptance_per_position: of all seeds together.
        counters: of all seeds together.
        programs: decode loops compiled by the call, 0 or 1.
    """

    seeds: tuple[int, ...]
    tokens_per_target_pass: OverSeeds | None
    mean_acceptance_length: OverSeeds | None
    realised_alpha: OverSeeds | None
    acceptance_per_position: tuple[float | None, ...]
    counters: Counters
    programs: int

    def to_dict(self) -> Json:
        """As plain values for a record."""
        return asdict(self)

    def __str__(self) -> str:
        def show(interval: OverSeeds | None) -> str:
            if interval is None:
                return "-"
            ends = "" if interval.low is None else f" [{interval.low:.3f}, {interval.high:.3f}]"
            return f"{interval.mean:.3f}{ends}"

        return (
            f"{len(self.seeds)} seeds, 95 % intervals: tokens per target pass {show(self.tokens_per_target_pass)}, "
            f"mean acceptance length {show(self.mean_acceptance_length)}, alpha {show(self.realised_alpha)}"
        )


def acceptance_over_seeds(
    model: Model,
    prompt: PromptLike,
    *,
    drafter: str | Drafter | DrafterPlan = "prompt_lookup",
    verifier: str | Verifier | None = None,
    sampling: SamplingParams | None = None,
    max_tokens: int | None = None,
    seeds: int | Sequence[int] = 32,
) -> SeedAcceptance:
    """Decodes one prompt with every seed in one batch; sequence i is what `generate(..., seed=seeds[i])` writes.

    Args:
        model: the target.
        prompt: text, token ids or a chat.
        drafter, verifier: as `generate` takes them.
        sampling: default temperature 1; at temperature 0 all seeds write the same.
        max_tokens: wins over the field of `sampling`; 64 where neither says.
        seeds: how many, counted from 0, or which.

    Raises:
        UserError: a mistake in any of these.
    """
    if not isinstance(model, Model):
        raise UserError(f"the first argument is a Model, from specsparse.load(...), not {type(model).__name__}")
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(int(s) for s in seeds)
    if not numbers:
        raise UserError("at least one seed is needed")
    params = SamplingParams(temperature=1.0, max_tokens=64) if sampling is None else sampling
    params = params if max_tokens is None else params.merged(max_tokens=max_tokens)
    method = make_method(model, drafter, verifier, params)
    if method.drafter is None:
        raise UserError("acceptance needs a drafter: give drafter=prompt_lookup")
    ids = prompt_ids(model, prompt, params)
    known = _decode_programs(model)
    session = Session(model, [Request(ids, params, seed) for seed in numbers], method, noting=bool(params.stop))
    decode(session)
    if Finish.FAILED in session.finish:
        raise UserError(f"{model.path}: the model's logits hold NaN or allow no token")
    each = session.counters()
    total = sum(each, Counters())
    rates = [metrics.rates(c) for c in each]
    return SeedAcceptance(
        seeds=numbers,
        tokens_per_target_pass=_interval([r["tokens_per_target_pass"] for r in rates]),
        mean_acceptance_length=_interval([r["mean_acceptance_length"] for r in rates]),
        realised_alpha=_interval([r["realised_alpha"] for r in rates]),
        acceptance_per_position=tuple(metrics.rates(total)["acceptance_per_position"]),
        counters=total,
        programs=_decode_programs(model) - known,
    )


def _interval(values: Sequence[float | None]) -> OverSeeds | None:
    found = [v for v in values if v is not None]
    return OverSeeds.of(found) if found else None


def _decode_programs(model: Model) -> int:
    """Decode loops among the model's programs (`Session.advance` names them)."""
    return sum(1 for (name, *_), *_ in model.programs if name == "decode")
