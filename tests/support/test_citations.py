"""Every registered method can be cited, and by the paper that its code names."""

import re
from pathlib import Path

import pytest

import specsparse
from specsparse.errors import UserError
from specsparse.predictors.base import PREDICTORS
from specsparse.speculative.drafters import DRAFTERS
from specsparse.speculative.trees import TREES
from specsparse.speculative.verifiers import VERIFIERS
from specsparse.support.citations import METHODS, UNPUBLISHED, WORKS


def test_every_method_has_its_papers_or_none():
    registered = {*DRAFTERS.names(), *VERIFIERS, *TREES.names(), *PREDICTORS.names()}
    assert registered - set(METHODS) - set(UNPUBLISHED) == set()
    assert {key for keys in METHODS.values() for key in keys} | {"specsparse"} == set(WORKS)


@pytest.mark.parametrize("name", [name for name, v in VERIFIERS.items() if v.paper])
def test_a_verifier_is_cited_by_the_paper_of_its_code(name):
    assert f"eprint        = {{{VERIFIERS[name].paper}}}" in specsparse.citation(name)


def test_one_entry_a_work():
    text = specsparse.citation("model", "token", "sequoia", "wor", "none")
    assert re.findall(r"@misc\{(\w+),", text) == ["specsparse", "leviathan2023", "chen2023", "sequoia"]
    assert text.count("{") == text.count("}")
    assert re.findall(r"@misc\{(\w+),", specsparse.citation()) == ["specsparse"]


def test_an_unknown_method():
    with pytest.raises(UserError, match="method 'blok' is unknown; did you mean block"):
        specsparse.citation("blok")


def test_the_citation_file_names_this_version():
    text = (Path(__file__).resolve().parents[2] / "CITATION.cff").read_text()
    assert f"\nversion: {specsparse.__version__}\n" in text
    assert f'title: "{WORKS["specsparse"].title}"' in text
