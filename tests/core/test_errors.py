"""Errors for users: near names, bounded quotations, warnings at the caller's line, and missing packages."""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import polyformer
from polyformer.core.errors import Caution, InputError, caution, quote, unknown
from polyformer.core.imports import needs_extra
from polyformer.core.modules import names_wrong_types


def test_near_names_are_offered():
    error = unknown("model", "gpt3", ["gpt2", "bert-base", "transformer-base"])
    assert str(error) == "unknown model 'gpt3': did you mean 'gpt2'?"
    assert str(unknown("model", "bert", ["bert-base", "bert-bass"])).endswith("'bert-bass' or 'bert-base'?")


def test_all_names_are_listed_when_they_are_few():
    assert str(unknown("kind", "zzz", ["b", "a"])) == "unknown kind 'zzz': expected one of 'a', 'b'"
    assert str(unknown("kind", "zzz", [])) == "unknown kind 'zzz': expected one of nothing"


def test_some_names_are_listed_when_they_are_many():
    names = [f"name{i:02}" for i in range(20)]
    text = str(unknown("kind", "zzz", names))
    assert text.startswith("unknown kind 'zzz': expected one of 20 names, such as 'name00', 'name01'")
    assert "name06" not in text


def test_it_is_a_value_error_whatever_was_given():
    assert isinstance(unknown("kind", None, ["a"]), ValueError)
    with pytest.raises(InputError):
        raise unknown("kind", ["a"], ["a"])


def laughs() -> list[object]:
    """A list whose `repr` has 10^12 entries."""
    data: list[object] = ["lol"] * 10
    for _ in range(11):
        data = [data] * 10
    return data


LARGE = (
    *(laughs(), {"a": laughs()}, "a" * 10**6, b"a" * 10**6, 10**6000, [10**6000], ["\n" * 300] * 300),
    {i: i for i in range(10**5)},
    {"a" * 500: {"b" * 500: {"c" * 500: 1}}},
)


@pytest.mark.parametrize("value", LARGE, ids=range(len(LARGE)))
def test_a_quotation_is_short_whatever_is_quoted(value: object):
    assert 0 < len(quote(value)) <= 200
    assert len(str(unknown("kind", value, ["a"]))) < 300


def test_a_short_value_is_quoted_whole_and_a_long_one_keeps_its_ends():
    for value in ({"b": 1, "a": (2, None)}, [1.5, "é\n"], "text", b"\x00", -3, None):
        assert quote(value) == repr(value)
    assert quote("a" * 500 + "z").endswith("z'")


def test_a_message_is_bounded_and_keeps_its_end():
    text = str(InputError("a" * 10**6 + " the way out"))
    assert len(text) == 2000
    assert text.endswith("the way out")


WRAPPERS = {
    "none": lambda function: function,
    "torch": torch.no_grad(),
    "names of types": names_wrong_types,
    "both": lambda function: names_wrong_types(torch.no_grad()(function)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_warning_names_the_line_of_the_caller_whatever_wraps_the_function(wrapper: str):
    wrapped = WRAPPERS[wrapper](caution)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default", Caution)
        for _ in range(2):
            wrapped("take care")  # THE LINE
        wrapped("take care")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert [(warning.category, str(warning.message), warning.filename) for warning in said] == [
        (Caution, "take care", __file__)
    ] * 2, "once for each line"
    assert "THE LINE" in lines[said[0].lineno - 1]


ROOT = Path(polyformer.__file__).parent
ERRORS = "InputError", "unknown", "too_long"
"""Calls that make an error for users."""


def unlimited(source: str) -> Iterator[str]:
    """The parts `{x!r}` and `repr(x)` of messages, and of the names that messages are put together from."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and name_of(node) in ERRORS]
    used = {node.id for call in calls for node in ast.walk(call) if isinstance(node, ast.Name)}
    assigned = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and {x.id for x in node.targets if isinstance(x, ast.Name)} & used
    ]
    for part in [*calls, *assigned]:
        for node in ast.walk(part):
            shown = isinstance(node, ast.FormattedValue) and node.conversion == ord("r")
            if shown or (isinstance(node, ast.Call) and name_of(node) == "repr"):
                yield f"line {node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]


def name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


@pytest.mark.parametrize(
    "source",
    [
        'raise InputError(f"a: {a!r}")',
        'raise unknown(f"kind of {a!r:.40}", a, b)',
        'where = f"row {a!r}"\nraise InputError(f"{where}: b")',
        'raise errors.InputError("a: " + repr(a))',
    ],
)
def test_a_message_with_an_unlimited_value_is_seen(source: str):
    assert list(unlimited(source))
    assert not list(
        unlimited(source.replace("a!r:.40", "quote(a)").replace("a!r", "quote(a)").replace("repr", "quote"))
    )


def test_messages_quote_what_was_given():
    wrong = [
        f"{file.relative_to(ROOT)}, {part}"
        for file in sorted(ROOT.rglob("*.py"))
        for part in unlimited(file.read_text())
    ]
    assert not wrong


def test_a_name_as_long_as_a_file_is_shown_in_part(tmp_path: Path):
    from polyformer.attention.functional.attend import attend  # noqa: F401
    from polyformer.attention.positions import PositionConfig

    with pytest.raises(InputError) as error:
        PositionConfig.kinds["rope"](layout="x" * 10**6)
    assert len(str(error.value)) < 400


def test_a_missing_package():
    with pytest.raises(InputError) as error, needs_extra("plot", "plot: drawing needs it"):
        import a_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401
    assert str(error.value) == "plot: drawing needs it; pip install 'polyformer[plot]'"
    assert isinstance(error.value.__cause__, ModuleNotFoundError)


def test_another_way():
    with (
        pytest.raises(InputError, match=r"; pip install 'polyformer\[plot\]', or leave it out$"),
        needs_extra("plot", "plot: drawing needs it", "or leave it out"),
    ):
        raise ImportError


def test_other_errors_pass():
    with pytest.raises(OSError, match="disk"), needs_extra("plot", "plot: drawing needs it"):
        raise OSError("disk")
