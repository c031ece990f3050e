"""House rules that a machine can check: sizes of files and functions, docstrings, names, the formatter."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "src").rglob("*.py"))
FILES = [*PACKAGE, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]

LINES, FUNCTION_LINES = 350, 60
EMPTY_NAMES = {"one", "found", "given", "told", "made", "written"}
"""Names that say how a value came about, not what it is."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def relative(files: list[Path]) -> list[str]:
    """The files as parameters of a test, named from the repository's root."""
    return [str(file.relative_to(ROOT)) for file in files]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def public(node: ast.AST) -> Iterator[Definition]:
    """Public classes, functions and methods, not those inside of functions; of overloads the last."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition) and not child.name.startswith("_"):
            if not any(ast.unparse(decorator) == "overload" for decorator in child.decorator_list):
                yield child
            if isinstance(child, ast.ClassDef):
                yield from public(child)
        elif isinstance(child, ast.If | ast.Try):
            yield from public(child)


def names(tree: ast.AST) -> Iterator[str]:
    """Every name that is bound: variables and arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.mark.parametrize("file", relative(FILES))
def test_a_file_is_short_and_its_names_say_what_things_are(file: str):
    text = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= LINES
    long = [node.name for node in functions(tree) if (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES]
    assert not long
    assert not EMPTY_NAMES & {*names(tree)}
    assert not [line for line in text.splitlines() if "# fmt" + ":" in line], "the formatter is obeyed"


@pytest.mark.parametrize("file", relative(PACKAGE))
def test_what_is_public_has_a_docstring(file: str):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert not [node.name for node in public(tree) if ast.get_docstring(node) is None]


def test_half_of_the_files_have_at_most_a_hundred_lines():
    lengths = sorted(len(file.read_text(encoding="utf-8").splitlines()) for file in PACKAGE)
    assert lengths[len(lengths) // 2] <= 100


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by their names alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, number in names.items() if number > 1]
