"""Cost model: what a forward reads and computes, what devices can do, what this machine was measured to do, and why a
run was as fast as it was."""

from specsparse.costs.acceptance import SeedAcceptance, acceptance_over_seeds
from specsparse.costs.devices import DEVICES, Device
from specsparse.costs.drafts import measure_draft, table_for, table_with_draft
from specsparse.costs.explain import Explanation, explain_record
from specsparse.costs.measure import load_or_measure
from specsparse.costs.model import Roofline
from specsparse.costs.traffic import Traffic
from specsparse.times.speculative import best_gamma, expected_tokens, predicted_speedup
from specsparse.times.table import CostTable, DraftCost

__all__ = [
    "DEVICES",
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
