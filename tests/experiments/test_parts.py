"""Names and options of the parts of a method: one table, from which help and documents are made."""

import os
from pathlib import Path

import pytest

from specsparse import run
from specsparse.errors import UserError
from specsparse.experiments.command_line import completed, described, help_text
from specsparse.speculative.drafters import DRAFTERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "drafters.md"
FOR_TESTS = ("scripted",)


def names_and_options() -> str:
    """Two tables: the drafters, and their options, each once with the drafters that have it."""
    names = [name for name in DRAFTERS.names() if name not in FOR_TESTS]
    lines = ["", "| drafter | also called | what it does |", "| --- | --- | --- |"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        aliases = [f"`{alias}`" for alias, whose in DRAFTERS.aliases.items() if whose == name]
        about = (run.conf_dir() / "drafter" / f"{name}.yaml").read_text().split("\nname:")[0]
        lines.append(f"| `{name}` | {', '.join(aliases)} | {about.replace('# ', '').replace(chr(10), ' ')} |")
        for option in described("drafter", name):
            default = "" if option.default is None else f"`{option.default}`"
            key = (
                option.name,
                default,
                ", ".join(f"`{word}`" for word in option.aliases),
                option.about.replace("|", "\\|"),
            )
            rows.setdefault(key, []).append(f"`{name}`")
    lines += ["", "| option | of | default | also called | meaning |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| `{name}` | {', '.join(of)} | {' | '.join(rest)} |" for (name, *rest), of in rows.items()]
    return "\n".join([*lines, "", ""])


def test_the_page_of_the_drafters_says_what_the_classes_say():
    before, mark, rest = PAGE.read_text().partition("writes what stands here -->\n")
    there, end, after = rest.partition("<!-- end -->")
    assert mark and end
    if os.environ.get("UPDATE_GOLDEN") == "1":
        PAGE.write_text(before + mark + names_and_options() + end + after)
    else:
        assert there == names_and_options()


@pytest.mark.parametrize("name", [name for name in DRAFTERS.names() if name not in FOR_TESTS])
def test_every_option_is_described_and_has_a_default(name):
    assert all(option.about for option in described("drafter", name))
    given = {option.name: option.default for option in described("drafter", name)}
    assert completed("drafter", {"name": name, **given}) == {"name": name, **given}


def test_a_file_of_a_drafter_is_five_lines_at_most():
    for file in (run.conf_dir() / "drafter").glob("*.yaml"):
        assert len(file.read_text().splitlines()) <= 5, file


def test_the_help_of_a_choice():
    assert help_text("drafter", "none") == ""
    shown = dict(line.split(maxsplit=1) for line in help_text("drafter", "suffix").splitlines())
    assert shown["drafter.factor=1.0"] == "draft tokens per matched token."
    with pytest.raises(UserError, match="did you mean suffix"):
        help_text("drafter", "sufix")


def test_the_page_of_usage_shows_the_options_of_what_is_chosen(capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(["drafter=layer_skip", "--help"])
    assert not stop.value.code
    assert "drafter.layers=null" in capsys.readouterr().out
