"""`/metrics`: what the server did so far, in Prometheus's text form under vLLM's names, labels and bounds."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specsparse.runtime.metrics import Counters
from specsparse.tools.serve.worker import Moments

_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_LABELS = ("model_name", "engine")


class Totals:
    """Counters, gauges and histograms of one server.

    Args:
        name: of the model, a label of all.
        context: tokens that the model's context holds: the bounds of histograms of tokens end there.
        positions: tokens of the longest draft, or None for plain decoding, which has no counters of drafts.
    """

    def __init__(self, name: str, context: int, positions: int | None):
        self._registry, self._values = CollectorRegistry(), (name, "0")
        tokens = [m * 10**e for e in range(12) for m in (1, 2, 5) if m * 10**e <= context]
        self._running = self._gauge("num_requests_running", "Requests that are decoded.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens fed.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success", "Completions by why they ended.", (*_LABELS, "finished_reason"),
            registry=self._registry,
        )  # fmt: skip
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self._token = self._histogram("time_per_output_token_seconds", "Mean of a completion after its first.", _TOKEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting.", _REQUEST)
        self._prefill = self._histogram("request_prefill_time_seconds", "From the start to the first token.", _REQUEST)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end.", _REQUEST)
        self._prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a completion.", tokens)
        self._lengths = self._histogram("request_generation_tokens", "Generated tokens of a completion.", tokens)
        self._drafts: dict[str, Counter] = {}
        self._positions = positions
        if positions is not None:
            for what in ("drafts", "draft_tokens", "accepted_tokens"):
                self._drafts[what] = self._counter(f"spec_decode_num_{what}", f"Speculation: {what}.")
            self._per_position = Counter(
                "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft.",
                (*_LABELS, "position"), registry=self._registry,
            )  # fmt: skip
            for position in range(positions):
                self._per_position.labels(*self._values, str(position))

    def ended(self, reason: str, prompt: int, counters: Counters, times: Moments) -> None:
        """A completion more: why it ended ("stop", "length", "abort"), tokens of its prompt, what was counted, when."""
        count = counters.num_emitted_tokens
        self._prompt.inc(prompt)
        self._generated.inc(count)
        self._success.labels(*self._values, reason).inc()
        per_position = counters.num_accepted_tokens_per_pos
        if self._positions is not None:
            self._drafts["drafts"].inc(counters.num_drafts)
            self._drafts["draft_tokens"].inc(counters.num_draft_tokens)
            self._drafts["accepted_tokens"].inc(counters.num_accepted_tokens)
            for position, accepted in enumerate(per_position):
                self._per_position.labels(*self._values, str(position)).inc(accepted)
        if reason == "abort":
            return
        self._first.observe(times.first - times.arrived)
        self._whole.observe(times.ended - times.arrived)
        self._queue.observe(times.started - times.arrived)
        self._prefill.observe(times.first - times.started)
        self._decode.observe(times.ended - times.first)
        self._prompts.observe(prompt)
        self._lengths.observe(count)
        if count > 1:
            self._token.observe((times.ended - times.first) / (count - 1))

    def load(self, running: int, waiting: int) -> None:
        """So many requests are decoded, and so many wait; -1 is as before."""
        for gauge, value in ((self._running, running), (self._waiting, waiting)):
            if value >= 0:
                gauge.set(value)

    def text(self) -> bytes:
        """What `/metrics` answers."""
        return generate_latest(self._registry)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"vllm:{name}", about, _LABELS, registry=self._registry).labels(*self._values)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"vllm:{name}", about, _LABELS, registry=self._registry).labels(*self._values)

    def _histogram(self, name: str, about: str, bounds: tuple[float, ...] | list[int]) -> Histogram:
        return Histogram(f"vllm:{name}", about, _LABELS, buckets=bounds, registry=self._registry).labels(*self._values)
