"""SPEED-Bench (arXiv:2604.09557): 880 questions in 11 categories, from the user's own files.

NVIDIA's licence forbids passing them on, and its published files have no texts: `specdec_bench` fetches those.
"""

from pathlib import Path

from specsparse.errors import UserError

NAME = "speed_bench"
CATEGORIES = (
    "coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization",
    "writing",
)  # fmt: skip
"""Of the qualitative part, 80 questions each; the throughput parts have low_entropy, mixed and high_entropy."""
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


def files(path: str | None) -> list[Path]:
    """The files of questions: the one named, or all .jsonl files of a folder, by name.

    Raises:
        UserError: no path, or nothing there.
    """
    if path is None:
        raise UserError("data=speed_bench reads your own files: give data.path=FILE.jsonl, or a folder of such files")
    place = Path(path).expanduser()
    if not place.is_dir():
        return [place]
    found = sorted(place.glob("*.jsonl"))
    if not found:
        raise UserError(
            f"data.path={path} holds no .jsonl file (SPEED-Bench's questions, as specdec_bench writes them)"
        )
    return found


def check_text(text: str, where: str) -> None:
    """Refuse a question without its text.

    Raises:
        UserError: it is the placeholder of the published files.
    """
    if _PLACEHOLDER in text:
        raise UserError(
            f"{where}: the question's text is a placeholder: let NVIDIA's specdec_bench fetch the texts first"
        )
