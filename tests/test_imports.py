"""The order of folders, siblings that stand alone, and an import that loads nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyformer

ROOT = Path(polyformer.__file__).parent
ORDER = [
    "core", "position", "attention", "memory", "feedforward", "block", "stack", "heads", "architecture",
    "outputs", "generation", "model", "trajectory", "models", "hub", "presets", "checkpoints", "data",
    "objectives", "training", "tasks", "recipes", "visual", "bench", "documentation", "commands", "cli",
]  # fmt: skip
"""A part imports from itself and from earlier ones only."""

MEMBERS = ["position", "attention", "feedforward", "block", "heads", "presets", "objectives", "tasks"]
"""Folders of alternatives: a file of one imports nothing of its siblings but what they share, `base`."""

HEAVY = ["accelerate", "datasets", "huggingface_hub", "matplotlib", "pandas", "tokenizers", "transformers"]


def files() -> list[Path]:
    return sorted(one.relative_to(ROOT) for one in ROOT.rglob("*.py"))


def part(file: Path) -> str:
    """The folder, or the module at the top."""
    return file.parts[0].removesuffix(".py")


def imported(file: Path) -> Iterator[tuple[str, ...]]:
    """What of polyformer a file imports, wherever in it: ("core", "config", "Config"), say."""
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


def test_every_part_has_its_place():
    present = {part(file) for file in files()} - {"__init__"}
    assert present <= set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_part_imports_from_earlier_ones_only(name: str):
    allowed = set(ORDER[: ORDER.index(name) + 1])
    for file in files():
        if part(file) == name:
            for target in imported(file):
                assert target[0] in allowed, f"{file} imports {'.'.join(target)}"


@pytest.mark.parametrize("name", MEMBERS)
def test_members_stand_alone(name: str):
    for file in files():
        if part(file) == name and file.name not in ("__init__.py", "base.py"):
            for target in imported(file):
                if target[0] == name:
                    assert target[1] == "base", f"{file} imports its sibling {'.'.join(target)}"


def test_the_rules_can_see_a_violation():
    """The parser finds imports of every form, those inside functions included."""
    assert list(inside("polyformer.core.config.Config")) == [("core", "config", "Config")]
    assert list(inside("torch.nn")) == []
    assert ("stack", "Stack") in set(imported(Path("model.py")))
    assert {target[0] for target in imported(Path("stack/layer.py"))} > {"core", "block"}


@pytest.mark.parametrize("statement", ["import polyformer.cli", "from polyformer import *"])
def test_importing_loads_nothing_heavy(statement: str):
    """The second loads every public name, torch with them."""
    code = f"import sys\n{statement}\nprint(sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
