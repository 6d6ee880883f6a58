"""`/metrics`: counters, gauges and histograms of a server in Prometheus's text form, under vLLM's names and bounds."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specsparse.runtime.metrics import Counters

_TO_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_OF_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_LABELS = ("model_name", "engine")


@dataclass
class Timings:
    """Moments of a completion on the clock of `time.perf_counter`; one that has not come equals the one before it."""

    arrived: float
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0


class ServerMetrics:
    """Figures of one server, labelled with the model's `name`.

    Histograms of tokens end at the model's `context`. `positions` are the tokens of the longest draft, or None for
    plain decoding, which has no counters of drafts.
    """

    def __init__(self, name: str, context: int, positions: int | None):
        self._registry, self._values = CollectorRegistry(), (name, "0")
        tokens = [m * 10**e for e in range(12) for m in (1, 2, 5) if m * 10**e <= context]
        histograms = {
            "time_to_first_token_seconds": ("From arrival to the first token.", _TO_FIRST),
            "inter_token_latency_seconds": ("Between rounds: each counts with its completion's mean.", _PER_TOKEN),
            "request_time_per_output_token_seconds": ("Mean of a completion after its first token.", _PER_TOKEN),
            "time_per_output_token_seconds": ("Deprecated: request_time_per_output_token_seconds.", _PER_TOKEN),
            "e2e_request_latency_seconds": ("From arrival to the end.", _OF_REQUEST),
            "request_queue_time_seconds": ("Waiting.", _OF_REQUEST),
            "request_inference_time_seconds": ("From the start to the end.", _OF_REQUEST),
            "request_prefill_time_seconds": ("From the start to the first token.", _OF_REQUEST),
            "request_decode_time_seconds": ("From the first token to the end.", _OF_REQUEST),
            "request_prompt_tokens": ("Prompt tokens of a completion.", tokens),
            "request_generation_tokens": ("Generated tokens of a completion.", tokens),
        }
        self._running = self._new(Gauge, "num_requests_running", "Requests that are decoded.")
        self._waiting = self._new(Gauge, "num_requests_waiting", "Requests that wait.")
        self._prompt = self._new(Counter, "prompt_tokens", "Prompt tokens fed.")
        self._queries = self._new(Counter, "prefix_cache_queries", "Prompt tokens looked for in the prefix cache.")
        self._hits = self._new(Counter, "prefix_cache_hits", "Prompt tokens found there.")
        self._generated = self._new(Counter, "generation_tokens", "Tokens generated.")
        self._success = self._new(Counter, "request_success", "Completions by why they ended.", "finished_reason")
        self._histograms = {
            name: self._new(Histogram, name, about, buckets=bounds) for name, (about, bounds) in histograms.items()
        }
        self._drafts: dict[str, Counter] = {}
        if positions is not None:
            for what in ("drafts", "draft_tokens", "accepted_tokens"):
                self._drafts[what] = self._new(Counter, f"spec_decode_num_{what}", f"Speculation: {what}.")
            name, about = "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft."
            self._per_position = self._new(Counter, name, about, "position")
            for position in range(positions):
                self._per_position.labels(*self._values, str(position))

    def _new(self, kind: type, name: str, about: str, *more_labels: str, **options: object):
        """A figure under vLLM's name; one with more labels is labelled when it is counted."""
        made = kind(f"vllm:{name}", about, (*_LABELS, *more_labels), registry=self._registry, **options)
        return made if more_labels else made.labels(*self._values)

    def ended(self, reason: str, prompt: int, counters: Counters, times: Timings, *, cached: int = 0) -> None:
        """Adds a completion: why it ended ("stop", "length", "abort"), tokens of its prompt and those that the prefix
        cache had, its counters and times."""
        count = counters.num_emitted_tokens
        self._prompt.inc(prompt)
        self._queries.inc(prompt)
        self._hits.inc(cached)
        self._generated.inc(count)
        self._success.labels(*self._values, reason).inc()
        if self._drafts:
            self._drafts["drafts"].inc(counters.num_drafts)
            self._drafts["draft_tokens"].inc(counters.num_draft_tokens)
            self._drafts["accepted_tokens"].inc(counters.num_accepted_tokens)
            for position, accepted in enumerate(counters.num_accepted_tokens_per_pos):
                self._per_position.labels(*self._values, str(position)).inc(accepted)
        if reason == "abort":
            return
        observed = {
            "time_to_first_token_seconds": times.first - times.arrived,
            "e2e_request_latency_seconds": times.ended - times.arrived,
            "request_queue_time_seconds": times.started - times.arrived,
            "request_inference_time_seconds": times.ended - times.started,
            "request_prefill_time_seconds": times.first - times.started,
            "request_decode_time_seconds": times.ended - times.first,
            "request_prompt_tokens": prompt,
            "request_generation_tokens": count,
        }
        if count > 1:
            mean = (times.ended - times.first) / (count - 1)
            observed |= {"request_time_per_output_token_seconds": mean, "time_per_output_token_seconds": mean}
        rounds = counters.num_rounds - 1  # after the one that gave the first token
        for _ in range(rounds):
            self._histograms["inter_token_latency_seconds"].observe((times.ended - times.first) / rounds)
        for name, value in observed.items():
            self._histograms[name].observe(value)

    def load(self, *, running: int | None = None, waiting: int | None = None) -> None:
        """Sets how many requests are decoded, and how many wait; None leaves it."""
        for gauge, value in ((self._running, running), (self._waiting, waiting)):
            if value is not None:
                gauge.set(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)
