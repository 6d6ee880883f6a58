"""The option schema: what it takes, what it refuses in which words, and classes by name."""

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from specsparse.errors import UserError
from specsparse.support.options import Also, Internal, Range, Read, Rest, options_of, read
from specsparse.support.registry import Registry


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True)
class Copies:
    """A drafter.

    Attributes:
        nodes: tokens of a draft,
            at most.
        low, high: bounds.
    """

    nodes: Annotated[int, Range(1, 512), Also("gamma", "draft_max")] = 10
    low: Annotated[float, Range(0, above=True)] = 0.5
    high: float | None = None
    top_k: Annotated[int, Range(1, besides=(-1,))] = -1
    rule: Literal["hot", "gate"] = "hot"
    rates: tuple[float, ...] = ()
    tasks: tuple[str, ...] | None = None
    exact: bool = False
    title: str = ""
    inner: Inner = field(default_factory=Inner)
    ids: Annotated[Any, Read(lambda v: tuple(int(i) for i in v), "a list of ids")] = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    made: Annotated[Any, Internal()] = None


def make(**given):
    return read(Copies, given, group="drafter", name="copies")


def test_defaults_are_the_class_s():
    assert make() == Copies() and make(nodes=None, rule=None) == Copies()


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"gamma": 3}, {"nodes": 3}),
        ({"low": 2}, {"low": 2.0}),
        ({"high": 1}, {"high": 1.0}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"rates": [1, 0.5]}, {"rates": (1.0, 0.5)}),
        ({"tasks": "chat"}, {"tasks": ("chat",)}),
        ({"title": 7}, {"title": "7"}),
        ({"inner": {"depth": 4}}, {"inner": Inner(4)}),
        ({"ids": ["3", 4]}, {"ids": (3, 4)}),
        ({"extra": {"a": 1}}, {"extra": {"a": 1}}),
    ],
)
def test_values_are_brought_into_their_type(given, same):
    assert make(**given) == Copies(**same)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nods": 3}, "drafter.nods is no option of copies; did you mean nodes?"),
        ({"made": 3}, "drafter.made is no option of copies"),
        ({"nodes": 3, "gamma": 3}, "drafter.nodes and drafter.gamma are one option: give one of them"),
        ({"gamma": 0}, "drafter.gamma=0 must be a whole number of at least 1 and at most 512"),
        ({"nodes": 2.5}, "drafter.nodes=2.5 must be a whole number"),
        ({"nodes": True}, "drafter.nodes=True must be a whole number"),
        ({"low": 0}, "drafter.low=0 must be a number above 0"),
        ({"low": math.nan}, "drafter.low=nan must be a number above 0"),
        ({"low": "much"}, "drafter.low=much must be a number above 0"),
        ({"top_k": 0}, "drafter.top_k=0 must be a whole number of at least 1 or -1"),
        ({"rule": "cold"}, "drafter.rule=cold must be one of hot, gate"),
        ({"rates": 1.0}, "drafter.rates=1.0 must be a list, such as [a,b]"),
        ({"rates": "ab"}, "drafter.rates=ab must be a list, such as [a,b]"),
        ({"exact": 1}, "drafter.exact=1 must be true or false"),
        ({"inner": {"dept": 1}}, "drafter.inner.dept is no option; did you mean depth?"),
        ({"ids": "x"}, "drafter.ids=x must be a list of ids"),
        ({"extra": 3}, "drafter.extra=3 must be a group of values"),
    ],
)
def test_mistakes_are_one_line(given, says):
    with pytest.raises(UserError) as error:
        make(**given)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_a_value_without_default_is_needed():
    @dataclass(frozen=True)
    class Needs:
        path: str

    with pytest.raises(UserError, match=r"model\.path: a value is needed"):
        read(Needs, {}, group="model")


@dataclass(frozen=True)
class Choice:
    name: str = "none"
    at: Annotated[int, Range(1)] | Literal["auto"] = "auto"
    options: Annotated[dict[str, Any], Rest()] = field(default_factory=dict)


@dataclass(frozen=True)
class Groups:
    choice: Choice = field(default_factory=Choice)
    steps: int = 1
    limit: Annotated[float | None, Range(0)] = None


def test_what_is_no_option_is_kept_for_the_choice():
    given = {"choice": {"name": "a", "at": 3, "rank": None, "options": 2}}
    assert read(Groups, given, group="").choice == Choice("a", 3, {"rank": None, "options": 2})
    assert list(options_of(Choice)) == ["name", "at"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"steps": None}, "steps=null must be a whole number"),
        ({"choice": {"name": None}}, "choice.name=null must be a text"),
        ({"choice": {"at": "often"}}, "choice.at=often must be a whole number of at least 1 or auto"),
        ({"choice": 3}, "choice=3 must be a group of values"),
        ({"limit": math.inf}, "limit=inf must be a number of at least 0"),
        ({"step": 2}, "step is no option; did you mean steps?"),
    ],
)
def test_where_null_is_a_value_it_is_one_in_the_groups_too(given, says):
    with pytest.raises(UserError) as error:
        read(Groups, given, group="", null=True)
    assert str(error.value) == says
    assert read(Groups, {"limit": None}, group="", null=True) == read(Groups, {"steps": None}, group="") == Groups()


def test_the_docstring_tells_what_an_option_is():
    about = {name: option.about for name, option in options_of(Copies).items()}
    assert about["nodes"] == "tokens of a draft, at most." and about["low"] == about["high"] == "bounds."
    assert "made" not in about


OWN = """
from dataclasses import dataclass
from tests.support.test_options import Copies

@dataclass(frozen=True)
class Echo(Copies):
    times: int = 2

class Other: ...
"""


@pytest.fixture
def registry():
    package, _, module = __name__.rpartition(".")
    return Registry("drafter", f"{__name__}:Copies", package, {"copies": f"{module}:Copies"}, {"copy": "copies"})


def test_names_aliases_and_classes_of_ones_own(registry, tmp_path, monkeypatch):
    (tmp_path / "mine_of_the_options_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = registry.make("mine_of_the_options_test:Echo", {"times": 3, "gamma": 5})
    assert (made.times, made.nodes) == (3, 5)
    assert registry.make("copy", {}) == Copies()
    registry.register("echo", type(made), aliases=("again",))
    assert registry.find("again") is type(made) and registry.names() == ["copies", "echo"]


@pytest.mark.parametrize(("name", "owner", "aliases", "says"), [
    ("copy", Copies, (), "drafter=copy is registered already"),
    ("new", Copies, ("copies",), "drafter=copies is registered already"),
    ("new", 3, (), "drafter=new is no Copies: derive it from"),
    ("new", object, (), "drafter=new is no Copies: derive it from"),
    ("a:b", Copies, (), "drafter=a:b can be no name"),
    (None, Copies, (), "drafter=null can be no name"),
])  # fmt: skip
def test_what_cannot_be_registered_is_refused_and_nothing_is_kept(registry, name, owner, aliases, says):
    with pytest.raises(UserError, match=says):
        registry.register(name, owner, aliases=aliases)
    assert registry.names() == ["copies"] and dict(registry.aliases) == {"copy": "copies"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("copis", "drafter=copis is unknown; did you mean copies?"),
        ("no_such_module:Echo", "there is no module no_such_module in the current folder or on PYTHONPATH"),
        ("broken_of_the_options_test:Echo", "failed: ZeroDivisionError: division by zero"),
        ("mine_of_the_options_test:Ecco", "module mine_of_the_options_test has no Ecco; did you mean Echo?"),
        ("mine_of_the_options_test:Other", "is no Copies: derive it from"),
        ("needy_of_the_options_test:Echo", "needs not_installed_anywhere, which is not installed"),
    ],
)
def test_a_class_that_cannot_be_had(registry, name, says, tmp_path, monkeypatch):
    (tmp_path / "mine_of_the_options_test.py").write_text(OWN)
    (tmp_path / "broken_of_the_options_test.py").write_text("1 / 0\n")
    (tmp_path / "needy_of_the_options_test.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UserError) as error:
        registry.make(name, {})
    assert says in str(error.value) and "\n" not in str(error.value)


def test_nothing_here_imports_jax():
    code = "import sys, specsparse.support.options, specsparse.support.registry; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
