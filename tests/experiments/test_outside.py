"""A user's own parts, from a file beside the run: no line of the package knows them."""

import importlib
import itertools
import json
import sys

import pytest
import yaml

import specsparse
from specsparse import run
from specsparse.errors import UserError
from specsparse.experiments.command_line import completed, is_outside
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.speculative.base import DraftKind
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.policies import get_policy
from specsparse.speculative.policies.base import Fixed, PMin
from specsparse.speculative.trees import get_tree
from specsparse.speculative.verifiers import get_verifier
from specsparse.testing import check_drafter, write_tiny_gguf
from tests.cells import cells

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

import jax.numpy as jnp

from specsparse.predictors import FFN, Needs, Predictor
from specsparse.predictors.base import as_mask
from specsparse.speculative.base import Drafter, DraftKind, Verifier
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees.static import StaticTree
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers.draft_rules import Match
from specsparse.speculative.verifiers.siblings import SiblingRule
from specsparse.support.options import Internal, Range, Share

SAME = Verifier("same", Match(), frozenset({DraftKind.ONE_HOT}), needs_p=False)
NUMBER = 3


@dataclasses.dataclass(frozen=True)
class Top(SiblingRule):
    """Keep what is likely enough; else sample p."""

    kinds = frozenset({DraftKind.ONE_HOT})
    least: Annotated[float, Range(0, 1)] = 0.5

    def enter(self, p_V, q_V, siblings):
        return ()

    def accept(self, p_x, q_x, memo):
        return (p_x >= self.least).astype(p_x.dtype)

    def reject(self, probs_V, q_V, child, memo, last):
        return probs_V, memo


@dataclasses.dataclass(frozen=True)
class Half(Fixed):
    share: float = 0.5

    def length(self, state):
        return state // 2


@dataclasses.dataclass(frozen=True)
class Fan(StaticTree):
    template: TreeTemplate = TreeTemplate.kary((3,))


@dataclasses.dataclass(frozen=True)
class First(Predictor):
    """Keeps the first neurons."""

    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5
    needs = Needs.NOTHING

    def fit(self, layer, rows_ND=None, *, index=0):
        return None

    def keep(self, weights, layer, x_RD, n_valid_B):
        first_F = jnp.arange(layer.ffn_gate.shape[0]) < round(self.share * layer.ffn_gate.shape[0])
        return as_mask(jnp.broadcast_to(first_F, (x_RD.shape[0], first_F.shape[0])), n_valid_B)


class Loose(Drafter):
    """No dataclass, and nothing in it."""


class Untyped(Drafter):
    kind, max_nodes, draft = DraftKind.ONE_HOT, 3, None
'''

PLAN = '''
"""A drafter that needs the target's model."""

from dataclasses import dataclass
from typing import Annotated

from specsparse.speculative.drafters.spec import DrafterSpec
from specsparse.speculative.drafters.self_draft import on_target
from specsparse.support.options import Range


@dataclass(frozen=True)
class EverySecond(DrafterSpec):
    """Every second layer of the target drafts."""

    start: Annotated[int, Range(0, 1)] = 0

    def build(self, target, load):
        layers = tuple(range(self.start, target.config.n_layers, 2))
        return on_target(self.style, target, target.forward, layers, target.params.layers[self.start :: 2])
'''

HEAD = '''
"""A head that another project publishes, in files of a kind of their own."""

import json
from dataclasses import dataclass, replace

import jax.numpy as jnp

from specsparse.speculative.base import Draft, Drafted, Drafter, DraftKind
from specsparse.speculative.drafters.heads.published import PublishedSpec
from specsparse.speculative.drafters.spec import LoadedDrafter


def read_pairs(path):
    return jnp.asarray(json.loads(path.read_text()), jnp.int32)


@dataclass(frozen=True)
class Pairs(Drafter):
    """After each token the one that a table names."""

    max_nodes: int = 4
    kind = DraftKind.ONE_HOT

    def with_room(self, nodes):
        return replace(self, max_nodes=nodes)

    def draft(self, params, state, ctx):
        last, tokens = jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, axis=1)[:, 0], []
        for _ in range(self.max_nodes):
            last = params[last]
            tokens.append(last)
        parents = jnp.broadcast_to(jnp.arange(self.max_nodes, dtype=jnp.int32) - 1, (len(last), self.max_nodes))
        count = jnp.clip(ctx.budget, 0, self.max_nodes)
        return Drafted(Draft(jnp.stack(tokens, axis=1), parents, count), state, ctx.cache)


@dataclass(frozen=True)
class PairsHead(PublishedSpec):
    """A table of pairs, from a file of JSON."""

    path: str | None = None
    reader = "head_part:read_pairs"

    def build(self, target, load):
        table = self.head_file(load)
        return LoadedDrafter(Pairs(), lambda capacity: table, table.nbytes)
'''

SHORT = ["max_tokens=8", "data.tasks=[code]", "data.chat=false", "time_split=0", "stream=false"]
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the user's files, which is the current one."""
    (tmp_path / "echo_part.py").write_text(ECHO)
    (tmp_path / "other_parts.py").write_text(OTHERS)
    (tmp_path / "plan_part.py").write_text(PLAN)
    (tmp_path / "head_part.py").write_text(HEAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("echo_part", "other_parts", "plan_part", "head_part"):
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
    argv = [
        f"model={model.path}",
        *SHORT,
        "drafter=echo_part:Echo",
        "drafter.back=2",
        "policy.gamma=3",
        "hydra.run.dir=out",
    ]
    assert run.main(argv) == 0, capsys.readouterr().err
    record = json.loads((here / "out" / "record.json").read_text())
    assert record["config"]["drafter"] == {"name": "echo_part:Echo", "back": 2}
    assert "same text: all" in capsys.readouterr().out


def test_one_file_of_python_and_one_of_yaml(here, model, capsys):
    """A new drafter has its own choice in a folder of configs."""
    (here / "conf" / "drafter").mkdir(parents=True)
    (here / "conf" / "drafter" / "echo.yaml").write_text(
        "# The last tokens once more.\nname: echo_part:Echo\nback: 2\n"
    )
    for options, back in (([], 2), (["drafter.back=5"], 5)):
        argv = [f"model={model.path}", "drafter=echo", *options, "--config-dir=conf", "--cfg", "job"]
        assert run.main(argv) == 0, capsys.readouterr().err
        assert yaml.safe_load(capsys.readouterr().out)["drafter"] == {"name": "echo_part:Echo", "back": back}


@pytest.mark.slow  # its cells are runs like those above
def test_a_sweep_over_one_s_own_and_a_built_in_one(here, model, capsys):
    assert (
        run.main(["-m", f"model={model.path}", *SHORT, "drafter=echo_part:Echo,suffix", "hydra.sweep.dir=cells"]) == 0
    )
    found = [json.loads((here / "cells" / cell / "record.json").read_text())["config"]["drafter"] for cell in "01"]
    assert [drafter["name"] for drafter in found] == ["echo_part:Echo", "suffix"] and found[1]["longest"] == 64
    assert "left out" not in capsys.readouterr().err


PLANS = {"gamma": {"gamma": 3}, "policy": {"policy": PMin(2, 0, 0.1)}, "tree": {"start": 1, "tree": "static"}}


# Chains are slow: ours, of the same class, are drafted by policies in tests/contracts.
@pytest.mark.parametrize("options", cells(PLANS, ["tree"]))
def test_a_plan_of_one_s_own_takes_what_drafters_with_a_model_take(here, model, options):
    """It has the options of `Drafting` beside its own, and drafts with the target's model."""
    plan = get_drafter("plan_part:EverySecond", **PLANS[options])
    check_drafter(plan)
    plain = specsparse.generate(model, PROMPT, max_tokens=16)
    assert specsparse.generate(model, PROMPT, max_tokens=16, drafter=plan).token_ids == plain.token_ids


def test_options_of_a_plan_of_one_s_own(here):
    with pytest.raises(UserError, match=r"drafter\.strat is no option of plan_part:EverySecond; did you mean start\?"):
        get_drafter("plan_part:EverySecond", strat=1)
    drawn = get_drafter("plan_part:EverySecond", temperature=0.5)
    assert (drawn.kind, drawn.start, drawn.style.free) == (DraftKind.SAMPLED, 0, True)
    assert resolve(MethodSpec("plan_part:EverySecond", policy=Fixed(5))).max_nodes == 5


def test_a_third_published_head_is_one_file(here, model, capsys):
    """Its class and the reader of its files; no line of the package knows either."""
    plain = specsparse.generate(model, PROMPT, max_tokens=16)
    table = [0] * model.config.vocab_size
    for token, following in itertools.pairwise([*PROMPT, *plain.token_ids]):
        table[token] = following
    (here / "pairs.json").write_text(json.dumps(table))
    head = get_drafter("head_part:PairsHead", path="pairs.json", gamma=3)
    fast = specsparse.generate(model, PROMPT, max_tokens=16, drafter=head)
    counters = fast.stats.counters
    assert fast.token_ids == plain.token_ids and counters.num_accepted_tokens > 0
    assert counters.num_draft_tokens > counters.num_drafts  # its drafts are as long as the policy's
    own = ["drafter=head_part:PairsHead", "policy.gamma=3"]
    assert run.main([f"model={model.path}", *SHORT, *own, "drafter.path=pairs.json", "hydra.run.dir=out"]) == 0
    assert json.loads((here / "out" / "record.json").read_text())["method"]["label"].startswith("lossless")
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        run.main([f"model={model.path}", *SHORT, *own, "drafter.path=./none.json", "hydra.run.dir=no"])
    assert capsys.readouterr().err == "specsparse: ./none.json: no such file\n" and not (here / "no").exists()


def test_a_predictor_of_the_command_line(here, model, capsys):
    few = ["max_tokens=8", "data.tasks=[code]", "data.chat=false", "time_split=0", "stream=false", "drafter=none"]
    own = ["ffn=predicted", "predictor=other_parts:First", "predictor.share=0.3"]
    assert run.main([f"model={model.path}", *few, *own, "hydra.run.dir=out"]) == 0, capsys.readouterr().err
    record = json.loads((here / "out" / "record.json").read_text())
    assert record["config"]["predictor"] == {"name": "other_parts:First", "share": 0.3}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["drafter=echo_part:Echo", "drafter.bakc=2"],
            "drafter.bakc is no option of echo_part:Echo; did you mean back?",
        ),
        (["drafter=echo_part:Echo", "drafter.back=0"], "drafter.back=0 must be a whole number of at least 1"),
        (["drafter=echo_prat:Echo"], "drafter=echo_prat:Echo: there is no module echo_prat"),
        (["drafter=echo_part:Ekko"], "module echo_part has no Ekko; valid: Echo"),
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
        (["drafter=echo_part:Echo", "verifier=other_parts:Half"], "is no Rule: derive it from"),
        (
            ["drafter=none", "ffn=predicted", "predictor=other_parts:First", "predictor.shre=1"],
            "predictor.shre is no option of other_parts:First; did you mean share?",
        ),
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
        "[specsparse.trackers]\nboard = my_board:Board\n"
    )
    sys.path.append(str(here))
    importlib.invalidate_caches()
    assert get_drafter("theirs", back=5).back == 5 and get_policy("half").share == 0.5
    assert is_outside("drafter", "theirs") and not is_outside("drafter", "their") and is_outside("tracker", "board")
    with pytest.raises(UserError, match=r"did you mean theirs\?"):
        get_drafter("their")


def test_what_is_of_elsewhere():
    assert is_outside("drafter", "a.b:C") and is_outside("predictor", "a:B")
    assert not is_outside("drafter", "suffix")


def test_another_projects_name_for_a_policy_of_one_s_own(here, model, capsys):
    argv = [f"model={model.path}", "policy=other_parts:Half", "policy.draft_max=3", "--cfg", "job"]
    assert run.main(argv) == 0
    assert completed("policy", {"name": "other_parts:Half", "draft_max": 3})["gamma"] == 3
    assert "name: other_parts:Half" in capsys.readouterr().out
