"""One stage, in a process of its own: `python -m specsparse.tools.bench.card.child STAGE PLAN`."""

import json
import sys

from specsparse.errors import UserError
from specsparse.tools.bench.card.job import NO_DEVICE, STAGES, check_device
from specsparse.tools.bench.card.stages import CardPlan, print_rows


def main(name: str, plan: CardPlan) -> int:
    """Runs the stage; exit code 0, 1 where it failed, `NO_DEVICE` where the device is not here."""
    try:
        check_device(plan)
    except UserError as error:
        print(error, file=sys.stderr)
        return NO_DEVICE
    return print_rows(STAGES[name], plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], CardPlan(**json.loads(sys.argv[2]))))
