"""Claim: the page of v(n) and its schema are made of the entries in docs/data/vn and of nothing else.

Expected: docs/vn.md and docs/data/vn.schema.json, the same bytes where no entry changed.
Run time: under a second. `make docs` runs it.
Command: python experiments/vn_page.py
"""

from pathlib import Path

from specsparse.support.files import to_json, write_atomically
from specsparse.tools.bench import vn_entries

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main() -> int:
    entries = [entry for path in sorted((DOCS / "data" / "vn").glob("*.json")) for entry in vn_entries.read_file(path)]
    write_atomically(DOCS / "data" / "vn.schema.json", to_json(vn_entries.schema(), indent=1) + "\n")
    write_atomically(DOCS / "vn.md", vn_entries.page(entries))
    print(f"{DOCS / 'vn.md'}: {len(entries)} entries")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
