"""Claim: with acceptance made up at a known rate, the measured speed-up is within 10 % of the cost model's prediction.

Expected: a table of rates 0.3, 0.6, 0.9 and draft lengths with measured / predicted between 0.9 and 1.1; exit code 1
otherwise. Prediction: E[tokens] of rate and length (Leviathan et al. 2211.17192, eq. 1) over v(gamma+1) and the round's
overhead as measured by `specsparse.costs`, on the same file and machine in the same minute. Drafting is free here: the
drafter repeats the last token.
Run time: two minutes for SmolLM2-135M on two cores.
Command: python experiments/synthetic_speedup.py
"""

import argparse
import json
import statistics
from dataclasses import dataclass

import numpy as np

import specsparse
from specsparse.bench.sides import token_ids
from specsparse.costs import CostTable
from specsparse.costs.measure import load_or_measure
from specsparse.engine.params import SamplingParams
from specsparse.model import Model
from specsparse.session import Method, Sequence, Session
from specsparse.speculative.drafters import Synthetic, SyntheticRates
from specsparse.speculative.method import choose_verifier

TOLERANCE = 0.10


@dataclass(frozen=True)
class Result:
    """Of one rate and length: speed-ups, medians over repeats; `tokens` a round that came out of `expected`."""

    rate: float
    gamma: int
    predicted: float
    measured: float
    low: float
    high: float
    expected: float
    tokens: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def method(rate: float, gamma: int) -> Method:
    drafter = Synthetic(SyntheticRates.geometric(gamma, rate=rate))
    return Method(drafter, choose_verifier(drafter, None, temperature=0.0))


def seconds(model: Model, how: Method, ids: np.ndarray, tokens: int, seeds: range) -> tuple[float, float]:
    """Seconds a token of one decoding, compilation and prompt apart, and tokens a round."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    spent, emitted, rounds = 0.0, 0, 0
    for seed in seeds:
        session = Session(model, [Sequence(ids, params, seed=seed)], how)
        session.advance()
        counters = session.counters(0)
        spent, emitted = spent + session.decode_s, emitted + counters.num_emitted_tokens
        rounds += counters.num_rounds
    return spent / emitted, emitted / rounds


def compare(model: Model, table: CostTable, rate: float, gamma: int, *, tokens: int, repeats: int) -> Result:
    """Plain and synthetic decoding in turn; every repeat has its own noise."""
    ids = token_ids(table.kv_base, model.config.vocab_size)
    how, ratios, found = method(rate, gamma), [], []
    kv = table.kv_base + tokens / 2
    for repeat in range(repeats + 1):
        plain, _ = seconds(model, Method(), ids, tokens, range(1))
        fast, per_round = seconds(model, how, ids, tokens, range(repeat, repeat + 2))
        if repeat:  # the first compiles
            ratios.append(plain / fast)
            found.append(per_round)
    return Result(
        rate=rate,
        gamma=gamma,
        predicted=table.predict(rate, gamma, kv_length=kv),
        measured=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        expected=how.drafter.rates.mean_acceptance_length(),
        tokens=statistics.fmean(found),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="measured against predicted speed-up at made-up acceptance")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    parser.add_argument("--gammas", type=int, nargs="+", default=[3, 5, 7])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kept", action="store_true", help="use the table kept in the cache instead of measuring anew")
    args = parser.parse_args()
    model = specsparse.load(args.model)
    table = load_or_measure(model, refresh=not args.kept)
    print("rate  gamma  E[tokens]  tokens/round  predicted  measured  (range)        measured/predicted")
    results = []
    for rate in args.rates:
        for gamma in args.gammas:
            r = compare(model, table, rate, gamma, tokens=args.tokens, repeats=args.repeats)
            results.append(r)
            between = f"({r.low:.2f}-{r.high:.2f})"
            print(
                f"{r.rate:.1f}   {r.gamma:4d}   {r.expected:8.2f}   {r.tokens:10.2f}   {r.predicted:8.2f}"
                f"   {r.measured:7.2f}  {between:13s}  {r.ratio:.3f}{'' if abs(r.ratio - 1) <= TOLERANCE else '  <--'}",
                flush=True,
            )
    worst = max(results, key=lambda r: abs(r.ratio - 1))
    row = {"worst": worst.ratio, "rate": worst.rate, "gamma": worst.gamma, "tolerance": TOLERANCE}
    print(json.dumps({"cpu": table.identity["cpu"], **row}))
    return 0 if abs(worst.ratio - 1) <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
