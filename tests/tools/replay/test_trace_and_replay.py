"""Rounds that are watched: the trace tells what happened, and a recording gives acceptance without the model."""

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

import specsparse
from specsparse import SamplingParams
from specsparse.cli.main import main as cli
from specsparse.errors import UserError
from specsparse.measure.recording import Recorder, Recording, Trace
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.runtime.session import Request, Session
from specsparse.speculative.base import ROOT
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.testing import write_tiny_gguf
from specsparse.testing.damaged import mutate
from specsparse.tools.replay.replay import replay, verifiers_of
from tests.cells import cells

VOCAB = 300
PROMPT = "hello world hello"
WARM = SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return specsparse.load(write_tiny_gguf(path, n_layers=1, vocab_size=VOCAB, context_length=96))


@pytest.fixture(scope="module")
def sampled(model):
    """A run with sampled chains under `token`, all distributions recorded, and what it generated."""
    recorder = Recorder(top=VOCAB)
    recorder.start("a")
    drafter = get_drafter("layer_skip", gamma=3, layers=[0], temperature=0.7)
    made = specsparse.generate(
        model, PROMPT, sampling=WARM, drafter=drafter, verifier="token", seed=2, watch=recorder.round
    )
    return recorder.recording(), made


def test_replay_agrees_with_the_live_run(sampled):
    recording, made = sampled
    live = made.stats.counters
    found = replay(recording, "token")
    assert (found.rounds, found.drafts, found.drafted) == (live.num_rounds, live.num_drafts, live.num_draft_tokens)
    assert found.realised == live.num_accepted_tokens == recording.accepted.sum()
    spread = np.sqrt(max(live.alpha_var, 1e-9))
    assert abs(found.accepted - live.num_accepted_tokens) < 5 * spread + 1


def test_other_verifiers_and_lengths(sampled):
    recording, _ = sampled
    assert verifiers_of(recording)[0] == "token" and {"match", "block"} <= set(verifiers_of(recording))
    expected = {name: replay(recording, name).accepted for name in ("match", "token", "block")}
    assert 0 < expected["match"] <= expected["token"] + 1e-6 and expected["block"] < recording.count.sum()
    lengths = [replay(recording, "token", gamma=g) for g in (1, 2, 3)]
    assert lengths[0].accepted < lengths[1].accepted < lengths[2].accepted
    assert lengths[0].per_position[0] == pytest.approx(lengths[2].per_position[0])
    with pytest.raises(UserError, match="cannot verify the sampled drafts"):
        replay(recording, "delta")
    with pytest.raises(UserError, match=r"gamma=4: the record has drafts of 1\.\.3"):
        replay(recording, "token", gamma=4)


def accepted_by_a_uniform_distribution(recording):
    """Expected accepted tokens of the recorded chains where every token is as likely as any other."""
    total = 0.0
    for r in range(len(recording)):
        reach = 1.0
        for i in range(recording.count[r]):
            q_x = recording.q[r, i][recording.ids[r, i] == recording.tokens[r, i]].item()
            reach *= min(1.0, 1 / (VOCAB * q_x))
            total += reach
    return total


def test_another_temperature(sampled):
    recording, _ = sampled
    same = replay(recording, "token", temperature=0.9).accepted
    assert same == pytest.approx(replay(recording, "token").accepted)
    assert replay(recording, "token", temperature=0.3).accepted != pytest.approx(same)
    hot = replay(recording, "token", temperature=1e6)  # all of the distribution is there
    assert hot.accepted == pytest.approx(accepted_by_a_uniform_distribution(recording), rel=1e-3)
    cut = Recording(**{**vars(recording), "p_rest": recording.p_rest + 0.2})
    with pytest.raises(UserError, match="may lie beyond the recorded tokens"):
        replay(cut, "token", temperature=0.5)


def test_a_few_tokens_of_each_distribution_are_enough_for_chains(model, sampled):
    whole, _ = sampled
    recorder = Recorder(top=8)
    recorder.start("a")
    drafter = get_drafter("layer_skip", gamma=3, layers=[0], temperature=0.7)
    specsparse.generate(model, PROMPT, sampling=WARM, drafter=drafter, verifier="token", seed=2, watch=recorder.round)
    short = recorder.recording()
    assert short.ids.shape[2] == 2 * 8 + 3
    with pytest.raises(UserError, match="may lie beyond the recorded tokens; record more"):
        replay(short, "token", temperature=1.5)
    assert replay(short, "token").accepted == pytest.approx(replay(whole, "token").accepted, rel=1e-5)
    np.testing.assert_allclose((short.p.sum(2) + short.p_rest)[:, 0], 1, atol=1e-5)


@pytest.mark.parametrize("verifier", cells(["tree_match", "mss"], ["mss"]))  # verdicts by distributions, not by tokens
def test_trees_replay_too(model, verifier):
    if verifier == "mss":
        tree = get_drafter("layer_skip", layers=[0], temperature=0.7, tree=get_tree("sampled_iid", widths=[2, 2]))
    else:
        plain = specsparse.generate(model, PROMPT, sampling=WARM, seed=2)
        truth = (*plain.prompt_token_ids, *plain.token_ids)
        shape = TreeTemplate.kary((2, 2))
        tree = get_drafter("scripted", template=shape, ends=(3, ROOT, 1), vocab_size=VOCAB, truth=truth)
    recorder = Recorder(top=VOCAB)
    recorder.start("a")
    options = {"sampling": WARM, "drafter": tree, "seed": 2}
    made = specsparse.generate(model, PROMPT, **options, verifier=verifier, watch=recorder.round)
    recording = recorder.recording()
    found = replay(recording, verifier)
    assert found.realised == made.stats.counters.num_accepted_tokens > 5
    assert 0 < found.accepted < found.drafted
    whole = replay(recording, verifier, widths=(2, 2))
    assert (whole.accepted, whole.realised, whole.gamma) == (found.accepted, found.realised, 2)
    shallow = replay(recording, verifier, gamma=1)
    assert shallow.drafted <= 2 * found.drafts < found.drafted and shallow.accepted < found.accepted


def first_rounds(model, tree, verifier, seeds=range(12)):
    """The first round of each seed, recorded, and the accepted nodes of all."""
    recorder, accepted = Recorder(top=VOCAB), 0
    drafter = get_drafter("layer_skip", layers=[0], temperature=0.7, tree=tree)
    method = resolve(MethodSpec(drafter, verifier, sampling=WARM), model)
    ids = model.tokenizer.encode(PROMPT)
    for seed in seeds:
        recorder.start(str(seed))
        session = Session(model, [Request(ids, WARM, seed)], method, watch=recorder.round)
        session.advance(1)
        accepted += session.counters()[0].num_accepted_tokens
    return recorder.recording(), accepted


CUT = [("static", "tree_match", (3, 2, 1), (2, 1)), ("sampled_iid", "mss", (3,), (2,))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "verifier", "wide", "narrow"), CUT)
def test_a_narrower_tree_is_what_it_would_have_been(model, name, verifier, wide, narrow):
    """Rounds that begin at the same place: the wide record cut down against a live run with the narrow tree.

    The draws of a node are keyed by its number, which siblings of the first level keep.
    """
    recording, _ = first_rounds(model, get_tree(name, widths=wide), verifier)
    live, accepted = first_rounds(model, get_tree(name, widths=narrow), verifier)
    cut, own = replay(recording, verifier, widths=narrow), replay(live, verifier)
    assert cut.widths == narrow and cut.realised == own.realised == accepted
    assert (cut.rounds, cut.drafts, cut.drafted) == (own.rounds, own.drafts, own.drafted)
    assert cut.per_position == pytest.approx(own.per_position, rel=1e-4)
    assert replay(recording, verifier).accepted > cut.accepted > 0  # 15 nodes of 3 levels, each coin of them weighed
    with pytest.raises(UserError, match=r"^tree=4: the record has at most 3(,2,1)? siblings on its levels$"):
        replay(recording, verifier, widths=(4,))


def test_the_command(sampled, tmp_path, capsys):
    recording, _ = sampled
    recording.save(tmp_path / "laws.npz")
    again = Recording.load(tmp_path)
    assert again.about == recording.about and (again.p == recording.p).all()
    assert cli(["replay", str(tmp_path), "--verifier", "token,block", "--gamma", "1,3"]) == 0
    text = capsys.readouterr().out
    assert text.count("block") == 2 and f"{len(recording)} rounds recorded with token, gamma 3" in text
    assert cli(["replay", str(tmp_path), "--gamma", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["verifier"] == "token"
    assert cli(["replay", str(tmp_path), "--tree", "1,1", "--verifier", "token"]) == 0
    assert "1,1" in capsys.readouterr().out
    assert cli(["replay", str(tmp_path), "--tree", "2,1"]) == 2
    assert "tree=2,1: the record has at most 1,1,1 siblings" in capsys.readouterr().err
    assert cli(["replay", str(tmp_path / "none")]) == 2
    assert "record_laws=32" in capsys.readouterr().err
    (tmp_path / "laws.npz").write_bytes(b"nothing")
    assert cli(["replay", str(tmp_path)]) == 2


def test_the_trace_tells_the_rounds(model, tmp_path):
    out = io.StringIO()
    trace = Trace(tmp_path / "trace.jsonl", Console(file=out, width=200))
    trace.start("a")
    options = {"sampling": WARM.merged(temperature=0.0), "drafter": get_drafter("prompt_lookup", gamma=3)}
    made = specsparse.generate(model, PROMPT, **options, watch=trace.round)
    head, *rounds = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert head == {"prompt_id": "a", "prompt_ids": list(made.prompt_token_ids)}
    emitted = [t for row in rounds for t in row["emitted"] if t >= 0]
    assert tuple(emitted) == made.token_ids
    for row in rounds:
        accepted = sum(row["accepted"])
        assert row["target_ids"][:accepted] == row["proposal_ids"][:accepted]
        assert len(row["emitted"]) == 4 and row["cache_after"] - row["cache_before"] >= 1
        last = row.get("bonus", row.get("recovered"))
        assert last == row["target_ids"][accepted] and ("bonus" in row) == (accepted == len(row["proposal_ids"]))
    text = out.getvalue()
    for word in ("prompt ids", "proposal", "target", "accepted", "emitted", "cache", "round 0"):
        assert word in text


def test_a_damaged_recording_is_one_line(sampled, tmp_path, capsys):
    recording, _ = sampled
    file = tmp_path / "laws.npz"
    recording = Recording(recording.about, **{n: a[:2] for n, a in vars(recording).items() if n != "about"})
    recording.save(file)
    blob = file.read_bytes()
    refused = 0
    for damaged in (b"", *(blob[: len(blob) * i // 8] for i in range(1, 8)), *(mutate(blob, s) for s in range(60))):
        file.write_bytes(damaged)
        code = cli(["replay", str(file), "--gamma", "1", "--verifier", "token"])
        said = capsys.readouterr().err
        assert (code, said.count("\n")) in ((0, 0), (2, 1)), said
        refused += code == 2
    assert refused > 50


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda a: {n: x[:0] for n, x in a.items()}, "its number of rounds is not right"),
        (lambda a: {"p": a["p"][:, :, :-1]}, "its p is not right"),
        (lambda a: {"count": a["count"].astype(float)}, "its count is not right"),
        (lambda a: {"p": np.where(a["p"] > 0.1, np.nan, a["p"])}, "its p is not right"),
        (lambda a: {"p": a["p"] / 2}, "p is no distribution"),
        (lambda a: {"count": a["count"] + 9}, "count or accepted is out of range"),
        (lambda a: {"parents": a["parents"] + 2}, "a node does not follow its parent"),
        (lambda a: {"q_rest": None}, "its q is not right"),
    ],
    ids=["rounds", "shape", "type", "range of p", "sum of p", "range of count", "parents", "half of q"],
)
def test_a_recording_is_checked_when_it_is_read(sampled, tmp_path, wrong, said):
    recording, _ = sampled
    arrays = {name: array for name, array in vars(recording).items() if name != "about"}
    Recording(recording.about, **{**arrays, **wrong(arrays)}).save(tmp_path / "laws.npz")
    with pytest.raises(UserError, match=rf"laws\.npz: not a recording of distributions \({said}\)"):
        Recording.load(tmp_path)


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ({"depth": 10**9}, "its nodes are deeper than the drafts, or the drafts than their nodes"),
        ({"kind": "none"}, "'none' is not a valid DraftKind"),
        ({"temperature": "warm"}, "its temperature is not right"),
        ({"vocab": None}, "its vocab is not right"),
    ],
    ids=["depth", "kind", "temperature", "vocab"],
)
def test_the_facts_of_a_recording_are_checked_too(sampled, tmp_path, fact, said):
    recording, _ = sampled
    dataclasses.replace(recording, about={**recording.about, **fact}).save(tmp_path / "laws.npz")
    with pytest.raises(UserError, match=rf"not a recording of distributions \({said}\)"):
        Recording.load(tmp_path)
