"""Cost model: what a forward reads and computes, what devices can do, what this machine was measured to do, and why a
run was as fast as it was."""

from specsparse.measure.costs.acceptance import SeedAcceptance, acceptance_over_seeds
from specsparse.measure.costs.devices import Device
from specsparse.measure.costs.drafts import measure_draft, table_for, table_with_draft
from specsparse.measure.costs.explain import Explanation, explain_record
from specsparse.measure.costs.measured import load_or_measure
from specsparse.measure.costs.roofline import Roofline
from specsparse.measure.costs.traffic import Traffic
from specsparse.runtime.times.kept import CostTable, DraftCost
from specsparse.speculative.expected import best_gamma, expected_tokens, predicted_speedup

__all__ = [
    "CostTable",
    "Device",
    "DraftCost",
    "Explanation",
    "Roofline",
    "SeedAcceptance",
    "Traffic",
    "acceptance_over_seeds",
    "best_gamma",
    "expected_tokens",
    "explain_record",
    "load_or_measure",
    "measure_draft",
    "predicted_speedup",
    "table_for",
    "table_with_draft",
]
