import json
from collections import Counter

import pytest

from specsparse import prompts
from specsparse.errors import UserError

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
    assert prompts.load(str(file)) == [("text-1", "text", "one"), ("7", "b", "two")]


def test_own_text_is_split_at_blank_lines(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("one\nstill one\n\n\n  two\n")
    assert [p.text for p in prompts.load(str(file))] == ["one\nstill one", "  two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"txt": "x"}', 'expected an object with a "text"'),
        ("a.jsonl", b'["x"]', "expected an object"),
        ("a.jsonl", b'{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}', "'a' is there twice"),
        ("a.txt", b"\xff\xfe\xfa", "cannot read"),
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


def test_unknown_task_names_the_known_ones(tmp_path):
    with pytest.raises(UserError, match="tasks: chat, code"):
        prompts.load(tasks=["chats"])
    with pytest.raises(UserError, match="no such file"):
        prompts.load(str(tmp_path / "none.txt"))
