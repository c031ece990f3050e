"""The order of folders, members that stand alone, no circles, and an import that loads nothing heavy."""

import ast
import functools
import graphlib
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import polyformer
from polyformer.core.registry import import_modules

ROOT = Path(polyformer.__file__).parent
LEVELS = [
    {"core"},
    {"attention", "data"},
    {"nn"},
    {"models"},
    {"training"},
    {"applications"},
    {"cli"},
    {"__main__"},
]
"""A package imports from itself and from packages of earlier levels only."""

SHARED = {
    "attention.positions": {"added", "base", "rope_extensions"},
    "attention.patterns": {
        *("base", "block_base", "call_parts", "composition", "global_base", "implied", "layout", "mods"),
        "mod_program",
    },
    "attention.mechanisms": {
        *("base", "block_choice", "compressed_slots", "length_projections", "pair_terms", "pair_weights"),
        *("fused_forgetting", "random_directions"),
    },
    "nn.cache": {"base", "call"},
    "nn.memory": {"base", "recurrent", "store"},
    "nn.depth": {"base"},
    "nn.feedforward": {"feedforward"},
    "nn.block": {"wirings"},
    "nn.heads": {"base", "classification", "transform", "vocabulary"},
    "models.presets": {"base"},
    "training.tasks": {"base", "image", "labels", "masked", "seq2seq", "text"},
}
"""Folders of alternatives, and what their members share: a member, a file or a package, imports no other."""

LAZY = ["attention", "cli.plots", "models", "nn", "training"]
"""Packages with names of their modules and subpackages."""

HEAVY = [
    *("accelerate", "datasets", "gymnasium", "huggingface_hub", "matplotlib", "minari", "pandas"),
    *("tokenizers", "transformers"),
]


def files() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def package(file: Path) -> str:
    """Return the package of a file, or the module at the top."""
    return file.parts[0].removesuffix(".py")


def place(parts: tuple[str, ...]) -> tuple[str, str]:
    """Return the folder of members of a file or an import, "attention.patterns", and the member's name."""
    return ".".join(parts[:2]), "".join(parts[2:3]).removesuffix(".py")


@functools.cache
def imported(file: Path) -> tuple[tuple[str, ...], ...]:
    """Return the imports of polyformer anywhere in a file, such as ("core", "config", "Config")."""
    return tuple(_imported(file))


def _imported(file: Path) -> Iterator[tuple[str, ...]]:
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield from inside(name.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            for name in node.names:
                yield from inside(f"{node.module}.{name.name}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from inside(f"{node.value.id}.{node.attr}")  # polyformer.x after a plain import


def inside(name: str) -> Iterator[tuple[str, ...]]:
    first, *rest = name.split(".")
    if first == "polyformer" and rest not in ([], ["__version__"]):
        yield tuple(rest)


def file_of(target: tuple[str, ...]) -> Path | None:
    """The file of the module that an import names, or has the name in."""
    for length in range(len(target), 0, -1):
        path = Path(*target[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if (ROOT / file).is_file():
                return file
    return None


def test_every_package_has_a_level():
    present = {package(file) for file in files()} - {"__init__"}
    assert present == set().union(*LEVELS)


def test_the_library_does_not_import_its_laboratory():
    assert [file for file in files() if "polyformer_lab" in (ROOT / file).read_text()] == []


def offenders(allowed: Callable[[Path, tuple[str, ...]], bool]) -> list[str]:
    """Return "file: import" for every import that is not allowed."""
    pairs = ((file, target) for file in files() for target in imported(file))
    return [f"{file}: {'.'.join(target)}" for file, target in pairs if not allowed(file, target)]


def test_a_package_imports_from_earlier_levels_only():
    levels = {name: level for level, names in enumerate(LEVELS) for name in names}

    def earlier(file: Path, target: tuple[str, ...]) -> bool:
        own, imports = package(file), target[0]
        if own == "__init__":
            return True  # the front page has names of several packages
        level = levels.get(imports, len(LEVELS))
        return own == imports or level < levels[own]

    assert not offenders(earlier)


def test_members_stand_alone():
    def alone(file: Path, target: tuple[str, ...]) -> bool:
        (folder, member), (origin, name) = place(file.parts), place(target)
        shared = SHARED.get(folder)
        if shared is None or origin != folder or member in {"__init__", *shared}:
            return True
        return name in {*shared, member}

    assert not offenders(alone)


def test_no_module_imports_itself_by_way_of_others():
    """Imports inside functions count: they hide a circle, and do not open it. A package's list of its own
    modules does not: whoever imports one of them runs it."""
    graph = {file: {file_of(target) for target in imported(file)} - {None, file} for file in files()}
    for file, targets in graph.items():
        targets -= {package / "__init__.py" for package in file.parents}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_the_rules_can_see_a_violation():
    """The parser finds imports of every form, those inside functions included."""
    assert list(inside("polyformer.core.config.Config")) == [("core", "config", "Config")]
    assert list(inside("torch.nn")) == []
    assert ("nn", "stack", "Stack") in set(imported(Path("models/architectures/transformer.py")))
    assert {target[0] for target in imported(Path("nn/stack/layer.py"))} > {"core", "nn"}
    assert "nn/stack/layer.py: nn.block.SubLayer" in offenders(lambda file, target: "block" not in target)
    assert file_of(("core", "config", "Config")) == Path("core/config.py")
    assert file_of(("nn", "stack", "Stack")) == Path("nn/stack/__init__.py")


@pytest.mark.parametrize("statement", ["import polyformer.cli.main", "from polyformer import *"])
def test_importing_loads_nothing_heavy(statement: str):
    """The second loads every public name, torch with them, in an interpreter of its own; nothing warns."""
    code = f"import sys\n{statement}\nprint(sorted(set({HEAVY}) & set(sys.modules)))"
    words = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["polyformer", *(f"polyformer.{p}" for p in LAZY)])
def test_type_checkers_know_the_names_that_are_loaded_when_used(name: str):
    module = importlib.import_module(name)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    names = set()
    for node in ast.walk(next(node for node in tree.body if isinstance(node, ast.If))):
        if isinstance(node, ast.ImportFrom):
            home = importlib.import_module(str(node.module))
            for alias in node.names:
                new = set(home.__all__) if alias.name == "*" else {alias.name}
                assert not names & new, "a name of two modules"
                names |= new
                assert alias.name in ("*", alias.asname), "a name that is private for type checkers"
    assert names == set(dir(module))


def test_a_name_loads_its_own_module_and_a_misspelt_name_none():
    """And so does a list of all names."""
    code = """
import sys, polyformer, polyformer.nn
assert not hasattr(polyformer, "Widnow")
assert "Window" in dir(polyformer) and "StackConfig" in dir(polyformer.nn)
assert "torch" not in sys.modules
polyformer.nn.DenseConfig
assert "polyformer.nn.feedforward" in sys.modules
print([name for name in ("heads", "memory", "stack") if f"polyformer.nn.{name}" in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_public_names_are_listed_and_found():
    assert set(polyformer.__all__) == set(dir(polyformer))
    for name in polyformer.__all__:
        assert getattr(polyformer, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Windw'"):
        _ = polyformer.Windw  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "folder",
    [folder for folder in SHARED if folder != "nn.depth"],
)
def test_a_member_is_registered_by_its_file_alone(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its folder imports every module that lies in it, and in the packages inside."""
    package = importlib.import_module(f"polyformer.{folder}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        assert module.name in sys.modules
    (tmp_path / "a_new_member.py").write_text("")
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{package.__name__}.a_new_member", raising=False)
    import_modules(package.__name__)
    assert sys.modules.pop(f"{package.__name__}.a_new_member").__file__ == str(tmp_path / "a_new_member.py")
