"""Parts of one's own on the command line: `--import mine.py`, for every command that reads such a model."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyformer import from_pretrained
from polyformer.attention.patterns.base import Pattern
from polyformer.cli.main import main
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.plugins import IMPORTED_NAMES, import_named
from polyformer.models.presets import create_model

MINE = '''
"""One part of each family, each almost another's."""
import dataclasses
from typing import ClassVar

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Pattern
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.attention.positions import SinusoidalConfig


@dataclasses.dataclass(frozen=True)
class Parity(Pattern):
    """Tokens a multiple of `step` apart."""

    step_size: int = 2

    def allows(self, context, b, h, q_idx, kv_idx):
        return context.distance(q_idx, kv_idx) % self.step_size == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyMechanism(SoftmaxConfig):
    kind: ClassVar[str] = "my_mechanism"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyPosition(SinusoidalConfig):
    kind: ClassVar[str] = "my_position"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyFeedForward(DenseConfig):
    kind: ClassVar[str] = "my_feedforward"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyBlock(PreNormConfig):
    kind: ClassVar[str] = "my_block"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyHead(LanguageModelConfig):
    kind: ClassVar[str] = "my_head"
'''
PARTS = {
    "attention": "Parity(3)",
    "mechanism": "my_mechanism(pattern=Parity(3))",
    "position": "my_position",
    "feedforward": "my_feedforward(intermediate_size=32)",
    "block": "my_block",
    "head": "my_head",
}


@pytest.fixture
def forget(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Makes as if the files in the test's folder had not been imported; so does the end of the test."""

    def back() -> None:
        files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
        own = {name for name, file in files.items() if Path(file).is_relative_to(tmp_path)}
        for registry in (Pattern.registry, *(family.kinds for family in Config.__subclasses__())):
            for name in [name for name, part in registry.items() if part.__module__ in own]:
                del registry[name]
        for name in own:
            del sys.modules[name]
        IMPORTED_NAMES.clear()
        sys.path[:] = [place for place in sys.path if place != str(tmp_path)]

    yield back
    back()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "parts_of_mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.parametrize("name", PARTS)
def test_own_parts_are_saved_and_loaded(name: str, mine: Path, tmp_path: Path, forget: Callable[[], None]):
    import_named(str(mine))
    model = create_model("decoder-tiny", **{name: PARTS[name]})
    model.save_pretrained(tmp_path / "saved")
    assert from_pretrained(tmp_path / "saved").config == model.config
    assert '"parts_of_mine.py"' in (tmp_path / "saved" / "config.json").read_text()
    forget()
    with pytest.raises(
        InputError, match=r"registered by parts_of_mine\.py: import that first, or pass --import"
    ):
        Transformer.from_pretrained(tmp_path / "saved")
    assert "parts_of_mine" not in sys.modules, "a checkpoint imports nothing"
    import_named(str(mine))
    assert from_pretrained(tmp_path / "saved").config.to_dict() == model.config.to_dict()


def test_a_model_of_ours_alone_names_no_imports():
    assert "imports" not in create_model("decoder-tiny").config.to_dict()


def test_every_command_takes_it(
    mine: Path, tmp_path: Path, forget: Callable[[], None], capsys: Any, complaint: Callable[..., str]
):
    Path("notes.txt").write_text("a few words to read and to write again\n" * 60)
    train = [
        "train",
        "--data",
        "notes.txt",
        "--tokenizer.algorithm",
        "bytes",
        "--steps",
        "1",
        "--out",
        "run",
        "--model.attention",
        "Parity(3)",
        "--model.head",
        "my_head",
    ]
    assert "unknown mechanism or pattern of attention 'Parity'" in complaint(*train)
    assert not Path("run").exists()
    assert main([*train, "--import", "parts_of_mine.py"]) == 0
    recipe = yaml.safe_load(Path("run/recipe.yaml").read_text())
    assert recipe["imports"] == [str(mine)]
    for words in (
        ["evaluate", "run"],
        ["generate", "run", "--prompt", "a"],
        ["show", "run"],
        ["show", "pattern", "Parity(2)"],
        ["train", "--resume", "run"],
        [
            "bench",
            "attention",
            "--members",
            "Parity(2)",
            "--lengths",
            "64",
            "--repeats",
            "1",
            "--heads",
            "1",
            "--width",
            "8",
            "--against",
            "[]",
        ],
        ["convert", "run", "out", "--attention", "Parity(2)"],
        ["list", "Parity"],
    ):
        forget()
        assert "Parity" in (error := complaint(*words)) or "my_head" in error
        if "run" in words:
            assert "registered by" in error
            assert "parts_of_mine.py" in error
        assert main([*words, "--import", str(mine)]) == 0, words
    capsys.readouterr()


def test_a_recipe_does_not_import_what_the_command_line_does_not_name(
    mine: Path, tmp_path: Path, forget: Callable[[], None], complaint: Callable[..., str], capsys: Any
):
    evidence = tmp_path / "evidence"
    mine.write_text(f"{MINE}\nopen({str(evidence)!r}, 'w').close()\n")
    Path("package").mkdir()
    mine.with_name("package").joinpath("__init__.py").write_text(mine.read_text())
    settings = "model: {preset: decoder-tiny, head: my_head}\n"
    for name in ("parts_of_mine.py", "./parts_of_mine.py", str(mine), "package", "parts_of_mine"):
        Path("own.yaml").write_text(f"imports: [{name}]\n{settings}")
        for words in (["--print"], [], ["--data", "own.yaml", "--print"]):
            error = complaint("train", "own.yaml", *words)
            assert f"imports: '{name}' is code" in error
            assert f"add --import {name} to the command" in error
    assert not evidence.exists()
    for name in ("parts_of_mine.py", str(mine)):
        Path("own.yaml").write_text(f"imports: [{name}]\n{settings}")
        assert main(["train", "own.yaml", "--print", "--import", "parts_of_mine.py"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["imports"] == [str(mine)]
    assert evidence.exists()


@pytest.mark.parametrize("imports", ["5", "[5]", "{a: b}", "[[]]"])
def test_imports_that_are_no_names(imports: str, mine: Path, complaint: Callable[..., str]):
    Path("own.yaml").write_text(f"imports: {imports}\n")
    assert "imports" in complaint("train", "own.yaml", "--print")


def test_a_recipe_imports_modules_of_this_project(mine: Path, forget: Callable[[], None], capsys: Any):
    Path("own.yaml").write_text("imports: [polyformer_lab.layers]\n")
    assert main(["train", "own.yaml", "--print"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["imports"] == ["polyformer_lab.layers"]
    assert "polyformer_lab.layers" in sys.modules


@pytest.mark.parametrize(
    "name", ["polyformer_lab.mine.py", "polyformer_lab.mine/x.py", "polyformer_lab.mine"]
)
def test_a_name_like_those_of_this_project_is_not_imported(
    name: str, mine: Path, tmp_path: Path, forget: Callable[[], None], complaint: Callable[..., str]
):
    path = Path(name) if name.endswith(".py") else Path(name, "__init__.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"open({str(tmp_path / 'evidence')!r}, 'w').close()")
    Path("own.yaml").write_text(f"imports: [{name}]\n")
    assert "import" in complaint("train", "own.yaml", "--print")
    assert not (tmp_path / "evidence").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nowhere.py", None, "--import nowhere.py: no such file"),
        ("no_such_module_here", None, "--import no_such_module_here: no such module; name a file as mine.py"),
        ("not-a-name.py", "", "--import not-a-name.py: 'not-a-name' is not a valid module name"),
        ("json.py", "", "--import json.py: the name 'json' is taken by "),
        ("broken_here.py", "x = 1\ny = 1 / 0\n", "ZeroDivisionError: division by zero (.*.py, line 2)"),
        ("needs_more.py", "import no_such_module_here", "it needs 'no_such_module_here', which"),
        (
            "taken_name.py",
            "from polyformer import Pattern\nclass Window(Pattern): ...",
            "the name is taken by polyformer.attention.patterns.windows.Window",
        ),
    ],
)
def test_a_module_that_fails_to_import_is_named(
    name: str,
    text: str | None,
    message: str,
    mine: Path,
    forget: Callable[[], None],
    complaint: Callable[..., str],
):
    if text is not None:
        Path(name).write_text(text)
    error = complaint("list", "--import", name)
    head, _, tail = message.partition("(.*")
    assert head in error
    assert tail.rstrip(")") in error


def test_a_package_s_folder_is_imported(mine: Path, forget: Callable[[], None], capsys: Any):
    Path("own_package").mkdir()
    Path("own_package/__init__.py").write_text("from own_package import parts\n")
    Path("own_package/parts.py").write_text(MINE)
    assert main(["list", "Parity", "--import=own_package"]) == 0
    assert "Tokens a multiple of `step` apart" in capsys.readouterr().out
    config = create_model("decoder-tiny", position="my_position").config
    assert config.to_dict()["imports"] == ["own_package.parts"]
