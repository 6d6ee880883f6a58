"""The object `metrics` of a response: its times, and vLLM's block about speculation."""

import itertools
from collections import defaultdict

from specsparse.runtime.metrics import rates
from specsparse.runtime.results import GenerationStats
from specsparse.support.files import Json
from specsparse.tools.serve.worker import Moments


def metrics(stats: GenerationStats, times: Moments, *, speculative: bool) -> Json:
    """Of one completion, by vLLM's names; `speculative_decoding` is None for plain decoding."""
    count, spent = stats.decode_tokens, times.ended - times.first
    whole = times.ended - times.started
    return {
        "time_to_first_token_ms": 1e3 * (times.first - times.started),
        "generation_time_ms": 1e3 * spent,
        "queue_time_ms": 1e3 * (times.started - times.arrived),
        "mean_itl_ms": 1e3 * spent / (count - 1) if count > 1 else None,
        "tokens_per_second": count / whole if whole > 0 else None,
        "speculative_decoding": speculation(stats) if speculative else None,
    }


def speculation(stats: GenerationStats) -> Json:
    """vLLM's block: a step is a round that drafted; the bonus token counts in `mean_acceptance_length` alone."""
    c, found = stats.counters, rates(stats.counters)
    reached = (c.num_drafts, *c.num_accepted_tokens_per_pos, 0)
    lengths = defaultdict[int, list[int]](list)
    for drafted, accepted in stats.drafts or ():
        lengths[drafted].append(accepted)
    return {
        "mean_acceptance_length": found["mean_acceptance_length"] or 1.0,
        "draft_acceptance_rate": found["draft_acceptance_rate"] or 0.0,
        "acceptance_histogram": [a - b for a, b in itertools.pairwise(reached)],
        "acceptance_histogram_by_draft_length": {
            str(k): [accepted.count(j) for j in range(k + 1)] for k, accepted in sorted(lengths.items())
        },
        "num_spec_steps": c.num_drafts,
        "num_accepted_draft_tokens": c.num_accepted_tokens,
        "num_draft_tokens": c.num_draft_tokens,
        "num_spec_tokens": len(c.num_accepted_tokens_per_pos),
        "per_step_accepted": [accepted for _, accepted in stats.drafts or ()],
        "per_step_drafted": [drafted for drafted, _ in stats.drafts or ()],
    }
