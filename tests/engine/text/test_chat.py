"""Chat templates: rendered as transformers does, and harmless whatever they hold."""

import json
import re
import time
import tracemalloc

import pytest

from specsparse.engine.text.chat_template import ChatTemplate
from specsparse.errors import UserError

USER = [{"role": "user", "content": 'hi <b> "q" é'}]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str, messages=USER, **options) -> str:
    return ChatTemplate(template, VARIABLES, where="m.gguf").render(messages, **options)


def failure(template, messages=USER) -> str:
    with pytest.raises(UserError) as caught:
        render(template, messages)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


def test_blocks_take_their_line_with_them():
    template = (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\nU: {{ m.content }}\n  {% endif %}\n{% endfor %}\nend"
    )
    assert render(template) == 'U: hi <b> "q" é\nend'


def test_what_a_template_sees():
    assert render("{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}") == "<s></s>TrueTrue"
    template = "{% if add_generation_prompt %}go{% endif %}"
    assert render(template) == "go" and render(template, add_generation_prompt=False) == ""
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))
    assert render("{% generation %}x{% endgeneration %}{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}") == "x1"
    assert render("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}") == "1/1True"


def test_tojson_is_plain_json():
    assert json.loads(render("{{ messages | tojson }}")) == USER
    assert render("{{ messages[0].content | tojson }}") == '"hi <b> \\"q\\" é"'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": 2\n}'
    assert len(json.loads(render("{{ ([{'a': [1]}] * 20000) | tojson(indent=4) }}"))) == 20000


def test_strings_are_joined_and_formatted_as_ever():
    assert render("{{ [1, 'a'] | join('-') }}{{ '-'.join(['x', 'y']) }}{{ 'a' ~ 1 ~ [2] }}") == "1-ax-ya1[2]"
    assert render(
        "{{ messages | map(attribute='role') | join(', ') }}|{{ ', '.join(messages | map(attribute='role')) }}"
    )
    assert render("{{ '%s=%d' % ('a', 3) }}{{ '%s' | format('b') }}{{ '{} {x}'.format(1, x=2) }}") == "a=3b1 2"
    assert (
        render("{{ 'a\nb' | indent(2) }}{{ 'aXb' | replace('X', '--') }}{{ 'x' * 3 }}{{ 2 ** 5 }}") == "a\n  ba--bxxx32"
    )
    assert (
        render("{% set ns = namespace(t='') %}{% for i in range(3) %}{% set ns.t = ns.t ~ i %}{% endfor %}{{ ns.t }}")
        == "012"
    )


def test_a_refusal_of_the_template_is_told():
    text = failure("{{ raise_exception('no system role\nhere') }}")
    assert text == "m.gguf: the chat template refuses these messages: no system role here"


@pytest.mark.parametrize("template", [None, 3, ["x"], "x" * (1 << 20) + "x"])
def test_no_template(template):
    assert "m.gguf: " in failure(template) and "template" in failure(template)


@pytest.mark.parametrize(
    "template",
    [
        *("{% if", "{{ 1 / 0 }}", "{{ a.b.c }}", "{{ 'a' | nope }}", "{% include 'x' %}", "{% extends 'x' %}"),
        *("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}"),
        *("{{ raise_exception.__globals__['json'] }}", "{{ strftime_now(3) }}", "{{" + "(" * 5000 + ")" * 5000 + "}}"),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_templates_that_fail(template):
    assert failure(template).startswith("m.gguf: the chat template ")


GROW = "{%% set ns = namespace(s='xxxxxxxx', l=[1]) %%}{%% for i in range(80) %%}%s{%% endfor %%}{{ ns.l }}"
RUNAWAYS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages }}{% endfor %}{% endfor %}",
    "{% for i in range(999999) %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% for x in [[1], [2]] recursive %}{{ loop([[1], [2]]) }}{% endfor %}",
    GROW % "{% set ns.s = ns.s ~ ns.s %}",
    GROW % "{% set ns.s = ns.s + ns.s %}",
    GROW % "{% set ns.s = ns.s * 9 %}",
    GROW % "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
    GROW % "{% set ns.s = ns.s.replace('x', ns.s) %}",
    GROW % "{% set ns.s = ns.s | replace('x', ns.s) %}",
    GROW % "{% set ns.s = [ns.s, ns.s] | join %}",
    GROW % "{% set ns.s = ns.s.join([ns.s, ns.s]) %}",
    GROW % "{% set ns.s = '{0}{0}'.format(ns.s) %}",
    GROW % "{% set ns.s = '%s%s' % (ns.s, ns.s) %}",
    GROW % "{% set ns.l = ns.l + ns.l %}",
    GROW % "{% set ns.l = [ns.l, ns.l] %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'x'.ljust(width=1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '\t'.expandtabs(8000000) * 2 }}",
    (GROW % "{% set ns.l = [ns.l, ns.l] %}").replace("ns.l }}", "ns.l | tojson }}"),
]


@pytest.mark.parametrize("template", RUNAWAYS)
def test_runaway_templates_end(template):
    start = time.perf_counter()
    assert failure(template).startswith("m.gguf: the chat template ")
    assert time.perf_counter() - start < 15  # 1.3 s at most where nothing else runs


@pytest.mark.parametrize(
    "expression",
    [
        "([1, 2] * 9) | tojson(indent=8000000)",
        "('x' * 999).translate({120: 'y' * 99999})",
        "('%99999d' * 999) % ((1,) * 999)",
        "('{:99999}' * 999).format(*(1,) * 999)",
        "('{0:{1}}' * 999).format(1, 99999)",
        "([[1] * 999] * 9999) | sum(start=[])",
        "('x' * 999) | wordwrap(1, true, 'y' * 99999)",
        "('www.a.b ' * 999) | urlize(target='y' * 99999)",
        "strftime_now('%99999d' * 9999)",
    ],
)
def test_what_would_be_large_is_not_made(expression):
    tracemalloc.start()
    try:
        assert failure("{{ " + expression + " }}").startswith("m.gguf: the chat template ")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_template_renders_again_after_a_runaway():
    template = "{% for i in range(messages | length * 30000) %}{% for j in range(20) %}{% endfor %}{% endfor %}ok"
    chat = ChatTemplate(template, {}, where="m.gguf")
    with pytest.raises(UserError):
        chat.render(USER * 2)
    assert chat.render(USER) == "ok"


def test_a_long_honest_chat_is_no_runaway():
    template = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim }}{{ '\n' }}{% endfor %}"
    text = render(template, [{"role": "user", "content": "word " * 500}] * 2000)
    assert len(text) > 4_900_000


@pytest.mark.parametrize(
    "messages",
    [
        *([], None, "hi", {"role": "user", "content": "x"}, ["hi"], [None], [{"role": "user"}], [{"content": "x"}]),
        *([{"role": 1, "content": "x"}], [{"role": "user", "content": None}], [{"role": "user", "content": ["x"]}]),
    ],
)
def test_messages_of_another_form(messages):
    assert "message" in failure("x", messages)
