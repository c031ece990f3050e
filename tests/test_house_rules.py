"""House rules that a machine can check: sizes of files and functions, docstrings, names, the formatter."""

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "src").rglob("*.py"))
FILES = [
    *PACKAGE,
    *sorted((ROOT / "lab").rglob("*.py")),
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
]

LINES, FUNCTION_LINES = 450, 60
EMPTY_NAMES = {"one", "found", "given", "told", "made", "written"}
"""Names that say how a value came about, not what it is."""

INHERITED = {"build", "examples", "new_state"}
"""Methods that the base classes of members document; a member describes only what is particular to it."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@functools.cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(text_of(file))


def offenders(files: list[Path], faults: Callable[[Path], Iterable[object]]) -> list[str]:
    """Return "file: fault" for every fault that `faults` finds in a file."""
    return [f"{file.relative_to(ROOT)}: {fault}" for file in files for fault in faults(file)]


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


def long_parts(file: Path) -> Iterator[str]:
    if (lines := len(text_of(file).splitlines())) > LINES:
        yield f"{lines} lines"
    for node in functions(tree_of(file)):
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES:
            yield f"{node.name}: {lines} lines"


def test_files_and_functions_are_short():
    assert not offenders(FILES, long_parts)


def test_names_say_what_things_are_and_the_formatter_is_obeyed():
    assert not offenders(FILES, lambda file: EMPTY_NAMES & {*names(tree_of(file))})
    assert not offenders(FILES, lambda file: [fmt for fmt in ["# fmt" + ":"] if fmt in text_of(file)])


def test_what_is_public_has_a_docstring():
    def missing(file: Path) -> list[str]:
        undocumented = (node.name for node in public(tree_of(file)) if ast.get_docstring(node) is None)
        return [name for name in undocumented if name not in INHERITED]

    assert not offenders(PACKAGE, missing)


def hidden_warnings(file: Path) -> Iterator[str]:
    """Warnings that a command would not print, or that name a line that the caller did not write."""
    calls = (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call))
    for call in calls:
        if ast.unparse(call.func) == "warnings.warn":
            yield f"line {call.lineno}: warnings.warn instead of polyformer.core.errors.caution"


def test_commands_print_every_warning():
    assert not offenders(PACKAGE, hidden_warnings)


def test_half_of_the_files_have_at_most_120_lines():
    lengths = sorted(len(text_of(file).splitlines()) for file in PACKAGE)
    assert lengths[len(lengths) // 2] <= 120


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by their names alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, number in names.items() if number > 1]
