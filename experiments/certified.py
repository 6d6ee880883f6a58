"""Claim: the verifiers of transformers, vLLM and llama.cpp keep the target's distribution, and every known mistake is
caught.

Expected: docs/certified.md, lossless "yes" in each row but the ensemble's, and no NO.
Run time: five minutes; needs these packages: pip install transformers torch llama-cpp-python.
Command: python experiments/certified.py docs/certified.md
"""

import argparse
import contextlib
import datetime
import importlib
import sys
from pathlib import Path

from specsparse.errors import UserError
from specsparse.speculative.proof.libraries import page
from specsparse.support.files import replacing

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="file to write")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat(), help="of the table")
    given = parser.parse_args()
    with contextlib.suppress(ImportError):  # the page says what is missing
        importlib.import_module("torch").set_num_threads(1)
    try:
        made = page(date=given.date, progress=lambda name: print(name, file=sys.stderr, flush=True))
        with replacing(given.page) as part:
            part.write_text(made, encoding="utf-8")
    except UserError as error:
        sys.exit(f"error: {error}")
