"""A user's own parts, from a file beside the run: no line of the package knows them."""

import importlib
import json
import sys

import pytest

import specsparse
from specsparse import run
from specsparse.errors import UserError
from specsparse.experiments.shorthand import shorthand
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.policies.registry import get_policy
from specsparse.speculative.trees import get_tree
from specsparse.speculative.verify import get_verifier
from specsparse.testing import check_drafter, write_tiny_gguf

ECHO = '''
"""A drafter of one screen."""

from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp

from specsparse.speculative.base import Drafter, DraftKind
from specsparse.speculative.drafters import lookup
from specsparse.support.options import Range


@dataclass(frozen=True)
class Echo(Drafter):
    """Proposes the last tokens once more."""

    max_nodes: Annotated[int, Range(1, 64)] = 4
    back: Annotated[int, Range(1, 64)] = 3
    kind = DraftKind.ONE_HOT

    def draft(self, params, state, ctx):
        start = jnp.maximum(ctx.length - self.back, 0)
        count = lookup.allowed(ctx, ctx.length - start, max_nodes=self.max_nodes)
        return lookup.drafted(lookup.copy_chain(ctx, start, count, max_nodes=self.max_nodes), state, ctx)
'''

OTHERS = '''
import dataclasses
from typing import Annotated

from specsparse.speculative.base import Drafter, DraftKind, Verifier
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees import StaticTree
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.verifiers.match import Match
from specsparse.speculative.verifiers.siblings import SiblingRule
from specsparse.support.options import Range

SAME = Verifier("same", Match(), frozenset({DraftKind.ONE_HOT}), needs_p=False)
NUMBER = 3


@dataclasses.dataclass(frozen=True)
class Top(SiblingRule):
    """Keep what is likely enough; else sample p."""

    kinds = frozenset({DraftKind.ONE_HOT})
    least: Annotated[float, Range(0, 1)] = 0.5

    def enter(self, p_V, q_V, siblings):
        return ()

    def accept(self, law_x, q_x, memo):
        return (law_x >= self.least).astype(law_x.dtype)

    def reject(self, law_V, q_V, child, memo, last):
        return law_V, memo


@dataclasses.dataclass(frozen=True)
class Half(Fixed):
    share: float = 0.5

    def length(self, state):
        return state // 2


@dataclasses.dataclass(frozen=True)
class Fan(StaticTree):
    template: TreeTemplate = TreeTemplate.kary((3,))


class Loose(Drafter):
    """No dataclass, and nothing in it."""


class Untyped(Drafter):
    kind, max_nodes, draft = DraftKind.ONE_HOT, 3, None
'''

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the user's files, which is the current one."""
    (tmp_path / "echo_part.py").write_text(ECHO)
    (tmp_path / "other_parts.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("echo_part", "other_parts"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path, quant="Q8_0", tokenizer="spm", context_length=512)
    return specsparse.load(str(path))


def test_generate_and_the_contract(here, model):
    plain = specsparse.generate(model, PROMPT, max_tokens=24)
    mine = specsparse.generate(model, PROMPT, max_tokens=24, drafter="echo_part:Echo", verifier="greedy")
    assert mine.token_ids == plain.token_ids and mine.stats.counters.num_draft_tokens > 0
    check_drafter(get_drafter("echo_part:Echo", back=2))
    assert get_drafter("echo_part:Echo", gamma=9).max_nodes == 9


def test_the_run_command(here, model, capsys):
    common = [
        f"model={model.path}",
        "max_tokens=8",
        "data.tasks=[code]",
        "data.chat=false",
        "time_split=0",
        "stream=false",
    ]
    argv = [*common, "drafter=echo_part:Echo", "drafter.back=2", "policy.gamma=3", "hydra.run.dir=out"]
    assert run.main(argv) == 0, capsys.readouterr().err
    record = json.loads((here / "out" / "record.json").read_text())
    assert record["config"]["drafter"] == {"name": "echo_part:Echo", "back": 2}
    assert "same text: all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["drafter=echo_part:Echo", "drafter.bakc=2"],
            "drafter.bakc is no option of echo_part:Echo; did you mean back?",
        ),
        (["drafter=echo_part:Echo", "drafter.back=0"], "drafter.back=0 must be a whole number of at least 1"),
        (["drafter=echo_prat:Echo"], "drafter=echo_prat:Echo: there is no module echo_prat"),
        (["drafter=echo_part:Ekko"], "module echo_part has no Ekko"),
        (["drafter=other_parts:Half"], "drafter=other_parts:Half is no Drafter: derive it from"),
        (["drafter=other_parts:Loose"], "drafter=other_parts:Loose has no draft, kind, max_nodes"),
        (["drafter=other_parts:Untyped"], "put @dataclass(frozen=True) above the class"),
        (["drafter=echo_part:Echo", "tree=static"], "drafter=echo_part:Echo drafts chains"),
        (["drafter=echo_part:Echo", "verifier=other_parts:NUMBER"], "is no specsparse.speculative.base.Verifier"),
        (
            ["drafter=echo_part:Echo", "verifier=other_parts:Top", "verifier.last=1"],
            "verifier.last is no option of other_parts:Top; did you mean least?",
        ),
        (["drafter=echo_part:Echo", "verifier=other_parts:SAME", "verifier.x=1"], "verifier.x is no option of"),
        (["drafter=echo_part:Echo", "verifier=other_parts:Half"], "is no SiblingRule: derive it from"),
        (["policy=other_parts:Half", "policy.share=x"], "policy.share=x must be a number"),
    ],
)
def test_mistakes_are_one_line(here, model, capsys, argv, line):
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(run.main([f"model={model.path}", *argv]))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and line in error and error.count("\n") == 1


def test_the_other_parts(here, model):
    assert get_verifier("other_parts:SAME").name == "same"
    top = get_verifier("other_parts:Top", least=0.2)
    assert top.rule.least == 0.2 and not top.lossless and top.needs_p
    assert get_policy("other_parts:Half", gamma=6).gamma == 6
    assert get_tree("other_parts:Fan").max_nodes == 3
    plain = specsparse.generate(model, PROMPT, max_tokens=16)
    mine = specsparse.generate(model, PROMPT, max_tokens=16, drafter="echo_part:Echo", verifier="other_parts:SAME")
    assert mine.token_ids == plain.token_ids
    specsparse.generate(model, PROMPT, max_tokens=16, temperature=0.8, drafter="echo_part:Echo", verifier=top)


def test_a_package_brings_its_own(here, model):
    """An entry point of an installed package is a name like ours."""
    info = here / "their_pkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their_pkg\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[specsparse.drafters]\ntheirs = echo_part:Echo\n[specsparse.policies]\nhalf = other_parts:Half\n"
    )
    sys.path.append(str(here))
    importlib.invalidate_caches()
    assert get_drafter("theirs", back=5).back == 5 and get_policy("half").share == 0.5
    assert shorthand(["drafter=theirs", "drafter.back=5"]) == ["~drafter", "++drafter.name=theirs", "++drafter.back=5"]
    with pytest.raises(UserError, match=r"did you mean theirs\?"):
        get_drafter("their")


def test_only_open_groups_and_unknown_names_are_spelled_out():
    assert shorthand(["drafter=a.b:C", "drafter.x=1", "policy.draft_max=3"]) == [
        "~drafter", "++drafter.name=a.b:C", "++drafter.x=1", "policy.gamma=3",
    ]  # fmt: skip
    assert shorthand(["policy=a:B", "policy.draft_max=3"])[2] == "++policy.gamma=3"
    same = ["drafter=suffix", "drafter.longest=3", "data.source=a:b", "name=a:b", "drafter=a:B,suffix"]
    assert shorthand(same) == same
