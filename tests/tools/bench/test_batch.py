"""`bench batch`: sequences at once, beside a scripted peer; beside the real ones where they are installed."""

import importlib.util
import json
import os

import numpy as np
import pytest

import specsparse
from specsparse.cli.main import main
from specsparse.speculative.base import SHORT_GAMMA
from specsparse.testing import write_tiny_gguf
from specsparse.tools import peers
from specsparse.tools.bench import speculation
from specsparse.tools.bench.speculation import BatchBench
from specsparse.tools.bench.speculation import batch_figure as figure_of
from specsparse.tools.peers import peer as timed

PACKAGES = {"llama.cpp": "llama_cpp", "ik_llama.cpp": "ik_llama_cpp"}
ELSEWHERE = peers.PYTHON_VARIABLE in os.environ


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    options = {"quant": "Q8_0", "n_layers": 1, "head_dim": 16, "context_length": 512}
    return write_tiny_gguf(tmp_path_factory.mktemp("batch") / "tiny.gguf", **options)


@pytest.fixture(scope="module")
def model(path):
    return specsparse.load(path)


def bench(capsys, path, *args):
    """Exit code, standard output and standard error of one call."""
    own = ("--model", str(path), "--pp", "8", "--tg", "4", "--repeats", "2")
    code = main(["bench", "batch", "1,2", *own, *map(str, args)])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_every_size_decodes_the_same_mix_of_texts():
    texts = [np.full(3, i, np.int32) for i in range(4)]
    for size, count in ((1, 4), (2, 2), (3, 4), (4, 1), (6, 2), (8, 1), (32, 1)):
        found = speculation.batches_of(texts, size)
        assert [len(b) for b in found] == [size] * count
        assert len(set(np.bincount([ids[0] for b in found for ids in b]))) == 1


def test_drafts_are_as_long_as_is_said_or_as_pays(model):
    assert BatchBench(sizes=(1,), model="m", drafter="suffix").methods() == {"suffix": None}
    assert BatchBench(sizes=(1,), model="m", drafted=(2, 7)).methods() == {"prompt_lookup 2": 2, "prompt_lookup 7": 7}
    assert speculation.method_of(model, "prompt_lookup", 7).max_nodes == 7
    assert speculation.method_of(model, "prompt_lookup", None).max_nodes == SHORT_GAMMA


def test_table_report_and_figure_beside_a_peer(path, capsys, tmp_path, scripted_peer):
    """Without flash attention a batch takes a quarter of a second whatever it holds, with it half of one."""
    scripted_peer({
        """*'"do": "batch"'*'"flash": true'*""": """echo '{"seconds": 0.5}'""",
        """*'"do": "rows"'*""": """echo '{"error": "it writes no logits"}'""",
        "*": """echo '{"seconds": 0.25}'""",
    })  # fmt: skip
    drawn = tmp_path / "batches.png"
    code, out, err = bench(capsys, path, "--gamma", 2, "--peer", "llama.cpp", "--plot", drawn, "--json")
    assert (code, err) == (0, "")
    assert "speed-up" in out and "llama.cpp, tok/s" in out and "no flash" in out and f"figure: {drawn}" in out
    assert "its perplexity was not compared with ours" in out
    assert drawn.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.splitlines()[-1])
    assert [(row["batch"], row["sequences"]) for row in found["rows"]] == [(1, 4), (2, 4)]
    theirs = [row["peers"]["llama.cpp"] for row in found["rows"]]
    assert [(p["flash"], p["tokens_per_second"]["median"]) for p in theirs] == [(False, n * 4 / 0.25) for n in (1, 2)]
    ours = [row["plain_tokens_per_second"]["median"] for row in found["rows"]]
    assert all(p["ratio"]["median"] == pytest.approx(o / r, rel=0.5) for p, o, r in zip(theirs, ours, (16, 32)))
    one, two = (row["speculative"]["prompt_lookup 2"] for row in found["rows"])
    assert one["tokens_per_target_pass"] == two["tokens_per_target_pass"] >= 1  # the same texts
    assert all(m["speedup"]["low"] <= m["speedup"]["value"] <= m["speedup"]["high"] for m in (one, two))
    assert all(set(m["speedup"]) == {"value", "low", "high", "repeats"} for m in (one, two))  # repeats are no prompts
    drawn_rows = figure_of(found).rows
    assert {row["side"] for row in drawn_rows} == {"plain", "prompt_lookup 2", "llama.cpp"}
    assert len(drawn_rows) == 2 * 4  # three rates and a speed-up of each size


@pytest.mark.parametrize(
    ("speedups", "at"),
    [
        ({1: 2.0, 4: 1.0}, 4.0),
        ({1: 2.0, 4: 0.5, 8: 3.0}, 2.0),  # half-way in logarithms; what comes later does not count
        ({2: 1.5, 4: 1.1}, None),
        ({1: 0.9, 2: 1.5}, None),
        ({8: 2.0}, None),
    ],
)
def test_where_speculation_stops_paying(speedups, at):
    rows = [{"batch": n, "speculative": {"x": {"speedup": {"value": s}}}} for n, s in speedups.items()]
    found = speculation.break_even(rows, "x")
    assert found == (None if at is None else pytest.approx(at))
    line = speculation.break_even_line("x", found, rows)
    first, last = speedups[min(speedups)], speedups[max(speedups)]
    if at is not None:
        assert line == f"x stops paying at about {at:.0f} sequences"
    elif first > 1:
        assert line == f"x pays at every size measured: {last:.2f} times plain decoding's speed with {max(speedups)}"
    else:
        assert line == f"x does not pay: {first:.2f} times plain decoding's speed with {min(speedups)}"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--peer", "transformers"), "has no batches here"),
        (("--rows", "4"), "unknown argument --rows"),
        (("--gamma", "none"), "'none' is not a whole number"),
        (("--tg", "0"), "0 is too small"),
        (("--tg", "600"), "the context holds 512"),
        (("--drafter", "prompt_lookdown"), "unknown model 'prompt_lookdown'"),
        (("--plot", "a.xyz"), "a.xyz: figures are written as PNG"),
    ],
)
def test_mistakes_are_one_line(path, capsys, args, says):
    code, _, err = bench(capsys, path, *args)
    assert code == 2 and says in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", PACKAGES)
def test_a_peers_batches(path, model, name):
    """Several sequences in one call, by the faster attention, with which its logits are this model's."""
    if not ELSEWHERE and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    prompts = {1: [[5, 6, 7]], 3: [[5, 6, 7], [8, 9], [5, 6, 7]]}
    with timed.Peer(name) as peer:
        peer.open(path, model.config, threads=1, room=8, depth=0)
        chosen = peer.choose_for_batches(prompts, 3)
        peer.check(model, widest=3)
        seconds = [peer.batch(prompts[n], 3, on) for n, on in chosen.items()]
        facts = peer.facts()
    assert set(chosen) == {1, 3} and all(s > 0 for s in seconds)
    assert facts["flash"] == {"decode": chosen[1], "verify": chosen[3]}
    assert not any(part["wrong"] for part in facts["check"].values())
