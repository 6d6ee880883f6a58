"""`+experiment=train_drafter` end to end on a tiny model: stopped, started again, judged, decoded with."""

import io
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import specsparse
from specsparse import ListDrafter, SamplingParams
from specsparse.engine.generate import Finish
from specsparse.errors import UserError
from specsparse.experiments import runner, sweeps
from specsparse.experiments.kinds import train_drafter, train_settings
from specsparse.experiments.kinds.train_settings import TrainSpec
from specsparse.kernels.reference.dense import rms_norm
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.runtime.session import Request, Session
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.heads.head import read_head
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import random_head
from specsparse.training import corpus, trainer, training_loop
from specsparse.training.corpus import fill
from specsparse.training.eagle_form import HeadForm, HeadWeights
from specsparse.training.trainer import reached
from tests.experiments import playing
from tests.experiments.playing import changed, quiet_context, random_texts, run_config, settings, stop_at

OPTIONS = {
    "batch": 4, "batches": 2, "answer": 24,
    "prompt_tokens": 300, "draft_vocab": 128, "steps": 6, "save_every": 2, "windows": 2,
    "rows": 320, "drafting": 48, "streams": 2, "candidates": 64, "gamma": 3, "warmup": 1, "temperatures": [0.0, 0.9],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", quant="Q8_0", context_length=512, n_layers=1)
    return specsparse.load(path)


@pytest.fixture
def cfg(model, tmp_path):
    train = TrainSpec(tokens=250, judged=3, output=str(tmp_path / "out"), options=OPTIONS)
    text = random_texts(tmp_path / "text.jsonl", 6, 20, task="t")
    return run_config(model.path, text=text, chat=False, kind="train_drafter", train=train)


def play(cfg, model, directory):
    found, text, record = playing.play(cfg, directory, model=model)
    return found.result, text, record


MODEL = {**OPTIONS, "form": "model", "width": 32, "heads": 2, "ffn": 64, "layers": 1, "draft_vocab": 0}


HEADS = {
    "below": {**OPTIONS, "below": [0]},
    "eagle3": {**OPTIONS, "form": "eagle3", "below": [0]},
    "dflash": {**OPTIONS, "form": "dflash", "below": [0], "streams": 3},
    "dspark": {**OPTIONS, "form": "dspark", "below": [0], "streams": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "options", "file"),
    [
        ("head", OPTIONS, "head"),
        ("head", {**HEADS["below"], "replay": 0.34}, "head"),
        ("eagle3", HEADS["eagle3"], "eagle3"),
        ("dflash", HEADS["dflash"], "dflash"),
        ("dspark", HEADS["dspark"], "dspark"),
        ("model", MODEL, "draft"),
    ],
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(cfg, model, tmp_path, monkeypatch, drafter, options, file):
    cfg = changed(cfg, "train", options=options)
    whole, shown, record = play(cfg, model, tmp_path / "a")
    assert "agreement" in shown and whole.path.name == f"out-{file}.gguf"
    curve = record["summary"]["curve"]
    assert [p["step"] for p in curve] == [0, 2, 4, 6] and curve[-1]["rows"] > curve[1]["rows"] > curve[0]["rows"] == 0
    assert curve[0]["seconds"] < curve[1]["seconds"]
    assert len(curve[1]["loss"]) == options["streams"] and curve[1]["rate"] > 0 and curve[0]["live"] >= 1
    assert record["summary"]["text"]["tokens"] >= 250 and record["summary"]["text"]["tokens_per_s"] > 0
    assert len((tmp_path / "a" / "curve.csv").read_text().splitlines()) == 5
    drafting = record["summary"]["drafting"]
    assert drafting["tokens"] > 0 and len(drafting["agreement"]) == 3 and drafting["acceptance"] >= 1

    live = record["summary"]["live"]
    assert curve[-1]["acceptance"] == drafting["acceptance"] and curve[-1]["live"] == live["acceptance"] >= 1
    assert 0 < live["tokens"] < drafting["tokens"] and curve[1]["learning_rate"] > 0
    assert record["trained"] == [str(whole.path)]

    saves = stop_at(monkeypatch, training_loop, "save_state", 2)
    again = changed(cfg, "train", output=str(tmp_path / "again" / "out"))
    with pytest.raises(KeyboardInterrupt):
        play(again, model, tmp_path / "b")
    found, _, _ = play(again, model, tmp_path / "b")
    assert len(saves) == 3  # no step twice
    points = map(json.loads, (tmp_path / "b" / "metrics.jsonl").read_text().splitlines())
    assert [p["step"] for p in points if p["series"] == "training"] == [0, 2, 4, 6]  # the earlier ones too
    assert found.path.read_bytes() == whole.path.read_bytes() and found.drafting == whole.drafting
    for name, other in {"text": {"answer": 20}, options.get("form", "head"): {"loss": "nla"}}.items():
        with pytest.raises(UserError, match=f"holds a training with another {name}: give train"):
            play(changed(cfg, "train", options={**options, **other}), model, tmp_path / "c")

    plain = specsparse.generate(model, "abc abc", max_tokens=40, ignore_eos=True)
    drafter = get_drafter(drafter, gamma=3, **{whole.form.option: whole.path})
    got = specsparse.generate(model, "abc abc", max_tokens=40, ignore_eos=True, drafter=drafter)
    assert got.token_ids == plain.token_ids and got.stats.counters.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("given", [OPTIONS, *HEADS.values(), MODEL], ids=["head", *HEADS, "model"])
def test_training_learns(cfg, model, tmp_path, given):
    """On a handful of texts, again and again, the divergence falls far below where it began."""
    losses = learned(cfg, model, tmp_path, given)
    assert (losses[-1].agreement > losses[0].agreement).all()


FORMS = {"head": OPTIONS, **HEADS, "model": MODEL}
OTHERS = [("qwen3", "head"), ("smollm3", "head"), *(("gemma3", form) for form in FORMS)]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "name"), OTHERS)
def test_training_learns_from_other_architectures(cfg, tmp_path, architecture, name):
    """Windows, norms of heads and of sums, scaled embeddings, layers without RoPE: what drafts is always the same.

    How often the argmax is right is not asked: under its scaled embeddings the distribution of a random Gemma is nearly
    one-hot, and the linear guess that training begins with has it right nine times in ten.
    """
    given = {"qwen3": {"head_dim": 32}, "smollm3": {}, "gemma3": {"full_every": 2, "head_dim": 32}}[architecture]
    path = tmp_path / "other.gguf"
    write_tiny_gguf(path, quant="Q8_0", architecture=architecture, context_length=512, n_layers=4, **given)
    other = specsparse.load(path)
    learned(changed(cfg, "model", path=str(path)), other, tmp_path, FORMS[name])


def learned(cfg, model, tmp_path, given):
    """The losses of 60 steps, which fall under half of where they began at every place of a draft."""
    cfg = changed(cfg, "train", options={**given, "steps": 60, "learning_rate": 3e-3})
    cfg = settings(cfg)
    _, data, train, _ = train_settings.options(cfg, *train_drafter.OWNERS)
    paths = corpus.generate(model, data, tmp_path / "texts", tokens=100)
    texts = [t for p in paths for t in corpus.read_shard(p)]
    made = trainer.Trainer(model, train, train_drafter.form_of(cfg, model))
    losses = []
    state = made.run(made.start(texts), texts, on_step=lambda _, __, found, ___: losses.append(found))
    assert int(state.step) == 60
    first, last = (np.mean([x.loss for x in part], axis=0) for part in (losses[:5], losses[-5:]))
    assert (last < 0.5 * first).all() and (last > 0).all()
    return losses


def test_candidates_hold_what_follows(cfg, model, tmp_path):
    cfg = settings(cfg)
    _, data, train, _ = train_settings.options(cfg, *train_drafter.OWNERS)
    paths = corpus.generate(model, data, tmp_path / "texts", tokens=100)
    texts = [t for p in paths for t in corpus.read_shard(p)]
    made = trainer.Trainer(model, train, HeadForm(model))
    ids = HeadForm(model).ids(texts, 128)
    answers = np.concatenate([t.tokens[t.prompt :] for t in texts])
    assert set(answers) <= set(ids) or len(set(answers)) > 128
    batches = made.batches(texts, ids, 0)
    seen = [next(batches).columns for _ in range(5)]
    assert all(len(c) == 64 and (np.diff(c) > 0).all() for c in seen) and len({tuple(c) for c in seen}) > 1
    later = made.batches(texts, ids, 3)
    np.testing.assert_array_equal(next(later).columns, seen[3])


def test_the_target_reads_a_text_once_while_there_is_room(model, monkeypatch):
    """Three turns of the same texts have the windows that a training without room makes."""
    rng = np.random.default_rng(0)
    texts = [corpus.Text(rng.integers(3, 60, 40).astype(np.int32), 5) for _ in range(4)]
    options = trainer.TrainOptions(windows=1, rows=64, drafting=48, candidates=0)

    def three_turns(room):
        made, seen = trainer.Trainer(model, options, HeadForm(model)), []
        features = made.form.features
        rows, features.room = features._rows, room
        monkeypatch.setattr(features, "_rows", lambda *args: seen.append(np.count_nonzero(args[2])) or rows(*args))
        batches = made.batches(texts, np.arange(128, dtype=np.int32), 0)
        return [next(batches) for _ in range(12)], sum(seen)

    (anew, often), (kept, once) = three_turns(0), three_turns(1 << 30)
    assert (often, once) == (12, 4)
    jax.tree.map(np.testing.assert_array_equal, anew, kept)


def test_replayed_steps_are_the_last_and_score_the_whole_draft_vocabulary(model):
    train = trainer.TrainOptions(steps=6, replay=0.34, candidates=64, rows=320, drafting=48)
    texts = [corpus.Text(np.arange(3, 43, dtype=np.int32), 5)]
    batches = trainer.Trainer(model, train, HeadForm(model)).batches(texts, np.arange(128, dtype=np.int32), 0)
    found = [next(batches) for _ in range(6)]
    assert [b.replay for b in found] == [False] * 4 + [True] * 2
    assert [len(b.columns) for b in found] == [64] * 4 + [128] * 2


class LastSeen(ListDrafter):
    """What followed the last token when it stood before."""

    max_nodes = 2

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        places = [i for i, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        return [*tokens[places[-1] + 1 if places else len(tokens) :], 0, 0][: min(limit, 2)]


def test_replay_begins_where_verification_stopped(model):
    """Target and drafter write a text together; the trainer finds the same rounds in it, and what they proposed."""
    drafter, prompt = LastSeen(), np.array([5, 9, 7, 30, 9, 7])
    request = Request(prompt, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), 0)
    method = resolve(MethodSpec(drafter, policy=Choice("fixed", {"gamma": 2})), model)
    session = Session(model, [request], method, noting=True)
    while Finish.RUNNING in session.finish:
        session.advance(16)
        session.end({})
    text = [*prompt.tolist(), *session.tokens()[0].tolist()]
    m, first = 60, len(prompt)  # row r is before token first + r
    right = np.zeros((2, m), bool)
    for row in range(m - 1):
        found = drafter.propose(text[: first + row], 2)
        right[[0, 1], [row, row + 1]] = np.equal(found, text[first + row : first + row + 2])
    begins_m, proposed_sm = trainer.rounds(right, np.arange(m))
    begins, proposed, row = np.zeros(m, bool), np.zeros((2, m), bool), 0
    for drafted, accepted in session.drafts()[0]:
        places = np.arange(min(accepted + 1, drafted))
        begins[row], proposed[places, row + places] = True, True
        row += accepted + 1
    assert 1 < begins.sum() < m - 2 and proposed[1].any()
    np.testing.assert_array_equal(begins_m[: m - 2], begins[: m - 2])  # behind, the limit of tokens cuts a draft
    np.testing.assert_array_equal(proposed_sm[:, : m - 2], proposed[:, : m - 2])


class Given(HeadForm):
    """Drafts by the logits that it is given as weights."""

    def logits(self, weights, frozen, embedding, window, count):
        return list(weights)


def test_replay_counts_proposals_alone(model):
    """The loss is the divergence from the target at accepted tokens and at the first wrong one, and nowhere else."""
    rng, (m, N, D) = np.random.default_rng(0), (12, 16, model.config.d_model)
    text = corpus.Text(rng.integers(0, N, m + 1).astype(np.int32), 2, rng.normal(size=(m + 1, D)).astype(np.float32))
    window = jax.tree.map(jnp.asarray, fill([text], rows=m, drafting=m, width=D))
    logits = rng.normal(size=(2, m, N)).astype(np.float32)
    following = np.append(text.tokens[2:], 0)
    logits[:, np.arange(m), following] = -9.0
    logits[0, [0, 1, 4, 5, 9], following[[0, 1, 4, 5, 9]]] = 9.0  # right first tokens
    logits[1, [5, 10], following[[5, 10]]] = 9.0  # right second ones
    made = trainer.Trainer(model, trainer.TrainOptions(streams=2, precision="float32"), Given(model))
    frozen = made.frozen(np.arange(N, dtype=np.int32))
    losses = jax.jit(partial(made._losses, replay=True))
    counted, sums = losses(logits, frozen, model.params.embedding, window)
    # Rounds begin at 0 (one accepted), 2, 3, 4 (both), 7, 8, 9 (both); the text ends with row 11.
    proposed = ([0, 2, 3, 4, 7, 8, 9], [1, 5, 10])
    z = np.asarray(rms_norm(window.after, frozen.output_norm, model.config.norm_eps) @ frozen.head.T)
    p, q = jax.nn.log_softmax(z), jax.nn.log_softmax(logits)
    wanted = [sum((np.exp(p[r]) * (p[r] - q[s, r])).sum() for r in rows) for s, rows in enumerate(proposed)]
    assert counted.tolist() == [len(rows) for rows in proposed]
    np.testing.assert_allclose(sums.loss, wanted, rtol=1e-4)


def test_what_training_sees_is_what_the_file_holds(model, tmp_path):
    form, rng = HeadForm(model, below=(0,)), np.random.default_rng(0)
    weights = jax.tree.map(lambda a: jnp.float32(rng.normal(0, 1, a.shape)), form.zeros())
    path = form.write(tmp_path / "h.gguf", weights, np.arange(16), quant="Q4_0")
    file = HeadWeights.from_params(read_head(path, model.config, floats=True).params)
    jax.tree.map(np.testing.assert_array_equal, form.written(weights, "Q4_0"), file)
    with pytest.raises(UserError, match=r"train\.quantise=Q4_K: its widths"):
        form.written(weights, "Q4_K")


def test_a_step_is_of_rounded_weights_and_moves_the_floats_behind_them(model):
    rng, (m, N, D) = np.random.default_rng(0), (12, 32, model.config.d_model)
    text = corpus.Text(rng.integers(0, N, m + 1).astype(np.int32), 2, rng.normal(size=(m + 1, D)).astype(np.float32))
    windows = jax.tree.map(lambda a: a[None], fill([text], rows=m, drafting=m, width=D))
    options = trainer.TrainOptions(streams=1, warmup=0, weight_decay=0, quantise="Q4_0", precision="float32")
    made = trainer.Trainer(model, options, Given(model))
    floats, ids, found = (jnp.float32(rng.normal(size=(m, N))),), np.arange(N, dtype=np.int32), []
    for weights in (floats, made.form.written(floats, "Q4_0")):
        begun = trainer.TrainState(weights, made._optimiser.init(weights), jnp.asarray(ids), jnp.int32(0))
        state, losses = made.step(made.frozen(ids), begun, trainer.HeadBatch(windows, ids, False))
        found.append((losses.loss, state.weights[0] - weights[0]))
    (loss, moved), (same, moved_same) = found
    np.testing.assert_array_equal(loss, same)
    np.testing.assert_allclose(moved, moved_same, atol=1e-6)
    assert 1e-4 < np.abs(moved).max() < 1e-3


def test_rounds_begin_behind_the_token_that_verification_adds():
    right = np.array([[1, 1, 0, 1, 1, 0, 1, 0], [0, 0, 1, 0, 1, 1, 0, 0]], bool)
    depth = np.array([0, 1, 2, 3, 0, 1, 2, -1])
    # First text: right at 0, wrong at 1, so the next draft begins at 2. It is wrong at once, so one begins at 3.
    # Second text: right at 4 and 5, so the next one would begin at 7, behind its end.
    begins, proposed = trainer.rounds(right, depth)
    assert np.flatnonzero(begins).tolist() == [0, 2, 3, 4]
    assert np.flatnonzero(proposed[0]).tolist() == [0, 2, 3, 4] and np.flatnonzero(proposed[1]).tolist() == [1, 5]
    np.testing.assert_array_equal(reached(right, depth, np.asarray(begins)), [2, 2, 1])  # those at 0 and 4 fit


def test_reach_counts_drafts_by_the_place_of_their_first_error():
    right = np.array([[1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1, 0]], bool)
    depth = np.array([0, 1, 2, 3, 0, 1, -1])
    # Begun at rows 0 and 1 (row 2 ends with its text): right at 0 then 1; right at 1 then 2.
    np.testing.assert_array_equal(reached(right, depth, depth >= 0), [2, 2, 2])
    right[1, 1] = False
    np.testing.assert_array_equal(reached(right, depth, depth >= 0), [2, 2, 1])
    np.testing.assert_array_equal(reached(right, depth, depth == 0), [1, 1, 0])


def test_a_sweep_over_forms_ends_with_one_table(tmp_path):
    for number, (form, right) in enumerate({"eagle3": [0.4, 0.3, 0.2], "dflash": [0.3, 0.1]}.items()):
        quality = {"tokens": 9, "agreement": right, "acceptance": 1.5}
        summary = {"bytes": 7_300_000, "drafting": quality, "live": {**quality, "tokens": 5}}
        record = {"name": "t", "kind": "train_drafter", "summary": summary, "config": {"train": {"form": form}}}
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "record.json").write_text(json.dumps(record))
    out = io.StringIO()
    sweeps.show(tmp_path, Console(file=out, width=160))
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["eagle3", "7.3", "at", "every", "position", "0.400", "0.300", "0.200", "1.50", "9"] in rows
    assert ["where", "decoding", "begins", "them", "0.300", "0.100", "-", "1.50", "5"] in rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"stepps": 3}}, "train.stepps is no option of kind=train_drafter; did you mean steps"),
        ({"options": {"steps": 2.5}}, r"train.steps=2.5 must be a whole number"),
        ({"options": {"gamma": 0}}, "train.gamma=0 must be a whole number of at least 1"),
        ({"options": {"decay": 2.0}}, "train.decay=2.0"),
        ({"options": {"quantise": "Q5_X"}}, "train.quantise: type Q5_X cannot be written: choose F32"),
        ({"options": {"form": "tree"}}, "train.form=tree must be one of head, eagle3, dflash, dspark, model"),
        ({"options": {"heads": 3}}, "train.width=128 must be a multiple of 2 train.heads, 6"),
        ({"options": {"temperatures": 1.0}}, "train.temperatures=1.0 must be a list"),
        ({"options": {"documents": ["nowhere.txt"]}}, "train.documents: nowhere.txt: cannot be read"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(cfg, changes, message):
    with pytest.raises(UserError, match=message):
        runner.check(changed(cfg, "train", **changes))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"form": "model", "below": [0]}, r"train\.below belongs to train\.form=head, eagle3, dflash and dspark"),
        ({"form": "eagle3", "begin": "smollm2-head"}, r"train\.begin belongs to train\.form=head"),
        ({"below": [5]}, r"train\.below=\[5\] must be ascending ids of layers under 1"),
        ({"form": "dflash", "below": [0]}, r"train\.gamma=3: a block of train\.streams=2 tokens has no more"),
        ({"form": "eagle3"}, r"has only 1 layers; name those that it reads"),
        ({"begin": "nobody"}, r"drafter\.head=nobody: no such file"),
    ],
)
def test_forms_fit_their_options_and_the_target(cfg, model, given, message):
    with pytest.raises(UserError, match=message):
        train_drafter.form_of(settings(changed(cfg, "train", options={**OPTIONS, **given})), model)


def test_documents_are_trained_on_beside_the_targets_text(cfg, model, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("abc " * 40, encoding="utf-8")
    cfg = settings(changed(cfg, "train", options={**OPTIONS, "documents": [str(path)]}))
    found, seen = train_drafter.texts(cfg, model, tmp_path / "out", quiet_context(tmp_path))
    written = [t for p in sorted((tmp_path / "out" / "texts").glob("*")) for t in corpus.read_shard(p)]
    ours = corpus.tokenised(model, corpus.read_documents(path), corpus.DataOptions(answer=24))
    assert len(ours) > 3 and len(found) == len(written) + len(ours)
    for got, wanted in zip(found[len(written) :], ours, strict=True):
        np.testing.assert_array_equal(got.tokens, wanted.tokens)
    assert seen["tokens"] >= 250 and seen["documents"] == sum(len(t.tokens) - 1 for t in ours)


def test_a_head_goes_on_from_a_file(cfg, model, tmp_path):
    begin = random_head(tmp_path, model, ids=range(3, 60))
    given = {**OPTIONS, "begin": str(begin), "below": [0]}
    form = train_drafter.form_of(settings(changed(cfg, "train", options=given)), model)
    assert form.size(128) == 57 and form.ids([], 128).tolist() == list(range(3, 60))
    weights = form.first([])
    assert not weights.fc_below.any() and weights.below_norm.shape == (model.config.d_model,)
    np.testing.assert_array_equal(weights.fc_own, weights.fc_hidden)
    path = form.write(tmp_path / "again.gguf", weights, form.ids([], 0), quant="F32")
    other = {**given, "begin": str(path), "below": []}
    with pytest.raises(UserError, match=r"reads layers \[0\] beside the last rows; give train.below=\[0\]"):
        train_drafter.form_of(settings(changed(cfg, "train", options=other)), model)
