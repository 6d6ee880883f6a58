"""The figures of a report, in the order of the page: each is made of the runs, or says why it is not."""

from collections.abc import Sequence

from specsparse.report.figure import Figure, Missing
from specsparse.report.figures import acceptance, cost, prediction, quality, sparsity, speedup, stages
from specsparse.report.methods import ReportedMethod
from specsparse.report.runs import Run

MAKERS = (
    speedup.by_task,
    speedup.against_gamma,
    speedup.against_temperature,
    acceptance.against_gamma,
    acceptance.against_temperature,
    acceptance.by_position,
    acceptance.by_task,
    acceptance.accepted_in_a_round,
    prediction.predicted_and_measured,
    stages.time_split,
    cost.verify_cost,
    sparsity.union_size,
    quality.quality_and_speed,
)


def make(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> tuple[list[Figure], list[Missing]]:
    """Every figure that the runs have numbers for, and why the others are left out."""
    made = [maker(runs, methods) for maker in MAKERS]
    return [f for f in made if isinstance(f, Figure)], [f for f in made if isinstance(f, Missing)]
