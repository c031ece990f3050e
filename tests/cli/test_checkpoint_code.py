"""Code that comes with a checkpoint is never run, and nobody is asked whether it may."""

import ast
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import polyformer
from forking import run_python
from polyformer.cli.main import main
from polyformer.cli.plots.explorer import explore
from polyformer.core.errors import InputError
from polyformer.core.foreign_checkpoints import load_by_transformers

KINDS = ("Config", "Model", "ModelForCausalLM", "Tokenizer", "ImageProcessor")
AUTO_MAP: dict[str, Any] = {f"Auto{kind}": f"evil.Evil{kind}" for kind in KINDS}
AUTO_MAP["AutoTokenizer"] = ["evil.EvilTokenizer", "evil.EvilTokenizer"]
SAID = "needs Python code of its own, which polyformer never runs"
OWN = ("evaluate", "datastore", "--transformers")  # for what our families do not read, these ask transformers

COMMANDS = [
    "evaluate EVIL --data TEXT",
    "evaluate EVIL --data TEXT --datastore STORE",
    "datastore build EVIL TEXT --out OUT",
    "explore EVIL words",
    "explore EVIL words --transformers",
    "explore EVIL photo.png --transformers",
    "generate EVIL",
    "translate EVIL words",
    "classify EVIL words",
    "tag EVIL words",
    "answer EVIL TEXT words",
    'choose EVIL words --choices ["a","b"]',
    "embed EVIL TEXT --out OUT",
    "prompt EVIL TEXT",
    "convert EVIL OUT",
    "calibrate EVIL --data TEXT",
    "show EVIL",
    "spectrum EVIL",
    "fit-pattern EVIL --text TEXT",
    "distill EVIL --data TEXT --out OUT",
    "data prepare TEXT --tokenizer EVIL --out OUT",
    "train --data TEXT --pretrained EVIL --out OUT",
    "train --data TEXT --tokenizer.path EVIL --out OUT",
]


@pytest.fixture
def run_me(tmp_path: Path) -> str:
    """A module that leaves a file behind if it is run."""
    classes = "".join(f"class Evil{kind}: pass\n" for kind in KINDS)
    return f"open({str(tmp_path / 'marker')!r}, 'w').close()\n{classes}"


def write(folder: Path, code: str, **files: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "evil.py").write_text(code)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def folders(tmp_path: Path, run_me: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole checkpoint of code, one whose tokenizer is code, one whose image processor is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))
    tokenizer = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": AUTO_MAP["AutoTokenizer"]}}
    images = {"image_processor_type": "EvilImageProcessor", "auto_map": AUTO_MAP}
    described = {"model_type": "evilmodel", "auto_map": AUTO_MAP, "architectures": ["EvilModel"]}
    write(tmp_path / "EVIL", run_me, config=described, tokenizer_config=tokenizer, preprocessor_config=images)
    sizes: dict[str, int] = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8}
    transformers.OPTModel(
        transformers.OPTConfig(vocab_size=20, ffn_dim=8, word_embed_proj_dim=8, **sizes)
    ).save_pretrained("reader")
    write(tmp_path / "reader", run_me, tokenizer_config=tokenizer)
    config = transformers.ViTConfig(image_size=8, patch_size=4, **sizes)
    transformers.ViTModel(config).save_pretrained("viewer")
    write(tmp_path / "viewer", run_me, preprocessor_config=images)
    (tmp_path / "words.txt").write_text("Some words.\n" * 20)
    return tmp_path


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line of a command that fails without a question and without running the code."""
    capfd.readouterr()
    assert main(list(words)) == 2
    out, error = capfd.readouterr()
    assert "?" not in out
    assert error.startswith("polyformer: error: ")
    assert error.count("\n") == 1
    assert not Path("marker").exists()
    return error


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_or_asks(command: str, folders: Path, capfd: pytest.CaptureFixture[str]):
    error = refused(capfd, *command.replace("TEXT", "words.txt").split())
    assert "evilmodel" in error or "EVIL" in error
    assert SAID in error or not any(word in OWN for word in command.split())


@pytest.mark.parametrize(("folder", "what"), [("reader", "words"), ("viewer", "photo.png")])
def test_tokenizers_and_image_processors(
    folder: str, what: str, folders: Path, capfd: pytest.CaptureFixture[str]
):
    assert f"{folder}: " in refused(capfd, "explore", folder, what, "--transformers")
    kind = "AutoTokenizer" if folder == "reader" else "AutoImageProcessor"
    Path(folder, "config.json").unlink()
    with pytest.raises(InputError, match=SAID):
        load_by_transformers(kind, folder)
    assert not Path("marker").exists()


def test_the_explorer_in_python_does_not_either(folders: Path):
    model = transformers.AutoModel.from_pretrained("viewer")
    with pytest.raises(InputError, match=f"{SAID}.*give tokenizer="):
        explore(model, np.zeros((8, 8, 3), np.uint8))
    assert not Path("marker").exists()


def test_code_in_the_cache_is_not_used(
    folders: Path, run_me: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Where another program has agreed to it before."""
    cache = folders / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.setattr(sys, "path", [*sys.path, str(cache)])
    package = cache / "transformers_modules" / "EVIL"
    package.mkdir(parents=True)
    for name in (package.parent / "__init__.py", package / "__init__.py"):
        name.touch()
    (package / "evil.py").write_text(run_me)
    assert SAID in refused(capfd, "evaluate", "EVIL", "--data", "words.txt")


@pytest.mark.parametrize("setting", ["attn_implementation", "experts_implementation"])
def test_kernels_are_code_too(setting: str, folders: Path, capfd: pytest.CaptureFixture[str]):
    config = Path("reader", "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), setting: "someone/kernel"}))
    error = refused(capfd, "explore", "reader", "words", "--transformers")
    assert "someone/kernel' of the hub" in error


def test_the_base_of_an_adapter_is_not_fetched(folders: Path, capfd: pytest.CaptureFixture[str]):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "EVIL", "megatron_core": "evil"}
    Path("reader", "adapter_config.json").write_text(json.dumps(adapter))
    error = refused(capfd, "explore", "reader", "words", "--transformers")
    assert "reader: an adapter; merge it into its model" in error


@pytest.mark.parametrize("command", ["evaluate EVIL --data words.txt", "explore EVIL a --transformers"])
def test_in_a_process_of_its_own(command: str, folders: Path):
    run = run_python("-m", "polyformer", *command.split(), input="y\n" * 1000)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1), run.stderr
    assert SAID in run.stderr
    assert not Path("marker").exists()


def test_one_module_loads_from_transformers():
    """Others ask it; `ours` are classes of this library and of torch."""
    root = Path(polyformer.__file__).parent
    ours = {"Transformer", "MODEL_CLASSES[type(read_config(folder))]", "nn.Embedding"}
    for file in {*root.rglob("*.py")} - {root / "core" / "foreign_checkpoints.py"}:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "from_pretrained":
                assert ast.unparse(node.value) in ours, file
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                assert not {"pipeline", "dynamic_module_utils"} & {alias.name for alias in node.names}, file
            assert not (isinstance(node, ast.keyword) and node.arg == "trust_remote_code"), file
            if isinstance(node, ast.Attribute) and node.attr == "pipeline":
                assert ast.unparse(node.value) != "transformers", file
