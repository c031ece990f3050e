"""What was given may be as long as a file: messages show it by `quote`, never by a bare `!r`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyformer
from polyformer.core.errors import InputError

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
def test_what_is_not_limited_is_seen(source: str):
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
