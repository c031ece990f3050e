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
ORDER = [
    *("core", "ops", "sequence", "patterns", "dot_product", "position", "attention", "memory", "depth"),
    *("inside", "transformers_attention"),
    *("feedforward", "block", "stack", "heads", "plugins", "architecture", "outputs", "generation", "model"),
    "parallel",
    *("hub", "presets", "checkpoints", "data", "objectives", "environments", "agents", "training", "tasks"),
    *("trials", "recipes", "datastore", "embedding", "calibration", "prompting"),
    *("visual", "documentation", "commands", "cli"),
    "__main__",
]
"""A part imports from itself and from earlier ones only."""

SHARED = {
    "position": {"base"},
    "patterns": {
        *(
            "base",
            "block_base",
            "by_distance",
            "composition",
            "expression",
            "global_base",
            "implied",
            "layout",
        ),
        *("mods", "mod_program", "residue_class", "spans", "user_defined"),
    },
    "attention": {"base", "dense_terms", "pair_terms", "some_heads", "tile_attention"},
    "memory": {"base", "compression", "recurrent", "search", "store"},
    "depth": {"active", "base", "recording"},
    "feedforward": {"base"},
    "block": {"base"},
    "heads": {"base", "problem_types", "transform", "vocabulary"},
    "presets": {"base"},
    "objectives": {"base"},
    "tasks": {"base", "joining", "keeping", "labels", "masking", "metrics", "text", "workers", "writing"},
}
"""Folders of alternatives, and what their members share: a member, a file or a package, imports no other."""

HEAVY = [
    *("accelerate", "datasets", "gymnasium", "huggingface_hub", "matplotlib", "minari", "pandas"),
    *("tokenizers", "transformers"),
]


def files() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def part(file: Path) -> str:
    """The folder, or the module at the top."""
    return file.parts[0].removesuffix(".py")


def member(file: Path) -> str:
    """What a file of a folder of members belongs to: the module or the package."""
    return file.parts[1].removesuffix(".py")


@functools.cache
def imported(file: Path) -> tuple[tuple[str, ...], ...]:
    """What of polyformer a file imports, wherever in it: ("core", "config", "Config"), say."""
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


def test_every_part_has_its_place():
    present = {part(file) for file in files()} - {"__init__"}
    assert present <= set(ORDER)


def test_the_library_does_not_import_its_laboratory():
    assert [file for file in files() if "polyformer_lab" in (ROOT / file).read_text()] == []


def offenders(allowed: Callable[[Path, tuple[str, ...]], bool]) -> list[str]:
    """Return "file: import" for every import that is not allowed."""
    pairs = ((file, target) for file in files() for target in imported(file))
    return [f"{file}: {'.'.join(target)}" for file, target in pairs if not allowed(file, target)]


def test_a_part_imports_from_earlier_ones_only():
    place = {name: number for number, name in enumerate(ORDER)}
    last = len(ORDER)

    def earlier(file: Path, target: tuple[str, ...]) -> bool:
        return place.get(target[0], last) <= place.get(part(file), last)

    assert not offenders(earlier)


def test_members_stand_alone():
    def alone(file: Path, target: tuple[str, ...]) -> bool:
        shared = SHARED.get(part(file))
        if shared is None or target[0] != part(file) or member(file) in {"__init__", *shared}:
            return True
        return target[1] in {*shared, member(file)}

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
    assert ("stack", "Stack") in set(imported(Path("model/transformer.py")))
    assert {target[0] for target in imported(Path("stack/layer.py"))} > {"core", "block"}
    assert "stack/layer.py: block.BlockConfig" in offenders(lambda file, target: target[0] != "block")
    assert file_of(("core", "config", "Config")) == Path("core/config.py")
    assert file_of(("stack", "Stack")) == Path("stack/__init__.py")


@pytest.mark.parametrize("statement", ["import polyformer.cli", "from polyformer import *"])
def test_importing_loads_nothing_heavy(statement: str):
    """The second loads every public name, torch with them, in an interpreter of its own; nothing warns."""
    code = f"import sys\n{statement}\nprint(sorted(set({HEAVY}) & set(sys.modules)))"
    words = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_type_checkers_know_the_names_that_are_loaded_when_used():
    names, stars = {}, []
    for node in ast.walk(ast.parse((ROOT / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            for alias in node.names:
                if alias.name == "*":
                    stars.append(node.module)
                else:
                    assert alias.asname == alias.name, "a name that is not private for users of the package"
                    names[alias.name] = str(node.module).removeprefix("polyformer.")
    assert names == polyformer._HOMES
    assert stars == ["polyformer.patterns"]


def test_public_names_are_listed_once_and_found():
    assert len(set(polyformer.__all__)) == len(polyformer.__all__)
    assert set(polyformer.__all__) <= set(dir(polyformer))
    for name in polyformer.__all__:
        assert getattr(polyformer, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Windw'"):
        _ = polyformer.Windw  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "folder",
    ["attention", "block", "feedforward", "heads", "memory", "patterns", "position", "presets", "tasks"],
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
