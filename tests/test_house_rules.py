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


def public(
    node: ast.AST, owner: ast.ClassDef | None = None
) -> Iterator[tuple[ast.ClassDef | None, Definition]]:
    """Public classes, functions and methods, with the class of a method; not those inside of functions, and
    of overloads the last."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition) and not child.name.startswith("_"):
            if not any(ast.unparse(decorator) == "overload" for decorator in child.decorator_list):
                yield owner, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, child)
        elif isinstance(child, ast.If | ast.Try):
            yield from public(child, owner)


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """The classes of the package by their names."""
    result: dict[str, list[ast.ClassDef]] = {}
    for file in PACKAGE:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                result.setdefault(node.name, []).append(node)
    return result


def inherits_docstring(owner: ast.ClassDef | None, method: str) -> bool:
    """Whether a base class of the package documents a method, directly or by its own base classes."""
    if owner is None:
        return False
    names = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in owner.bases)
    for base in (base for name in names if name != owner.name for base in classes().get(name, [])):
        for node in base.body:
            if isinstance(node, Definition) and node.name == method and ast.get_docstring(node):
                return True
        if inherits_docstring(base, method):
            return True
    return False


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
        undocumented = (pair for pair in public(tree_of(file)) if ast.get_docstring(pair[1]) is None)
        return [node.name for owner, node in undocumented if not inherits_docstring(owner, node.name)]

    assert not offenders(PACKAGE, missing)
    assert not inherits_docstring(classes()["Window"][0], "keys_after")


def hidden_warnings(file: Path) -> Iterator[str]:
    """Warnings that a command would not print, or that name a line that the caller did not write."""
    calls = (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call))
    for call in calls:
        if ast.unparse(call.func) == "warnings.warn":
            yield f"line {call.lineno}: warnings.warn instead of polyformer.core.errors.caution"


def test_commands_print_every_warning():
    assert not offenders(PACKAGE, hidden_warnings)


def test_files_are_chapters():
    """A reader finds an idea in one file of 150 to 450 lines, and not in five."""
    lengths = sorted(len(text_of(file).splitlines()) for file in PACKAGE)
    assert lengths[len(lengths) // 2] >= 180
    assert lengths[-1] <= 500


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by their names alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, number in names.items() if number > 1]
