"""Names on the hub, pinned to a revision: a real cache on disk, without a network."""

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

import polyformer
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.checkpoints import config_of
from polyformer.models.checkpoints.load import start_from
from polyformer.models.presets import create_model
from polyformer.training.recipes import Recipe

OLD, NEW = "1" * 40, "2" * 40
SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 20}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`own/model` as the hub's library keeps it: two commits, the newer one on main, the older one tagged."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--own--model"
    for commit, width in ((OLD, 16), (NEW, 32)):
        create_model("decoder-tiny", **{**SIZES, "hidden_size": width}).save_pretrained(
            folder / "snapshots" / commit
        )
        (folder / "snapshots" / commit / "vocab.txt").write_text("[UNK]\n" + "a\n" * width)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(NEW)
    (folder / "refs" / "v1").write_text(OLD)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "revision", "width"),
    [
        ("own/model", None, 32),
        ("own/model", OLD, 16),
        ("own/model", "v1", 16),
        ("own/model@v1", None, 16),
        (f"own/model@{NEW}", None, 32),
    ],
)
def test_a_name_means_what_it_was_at_a_revision(cache: Path, name: str, revision: str | None, width: int):
    assert polyformer.from_pretrained(name, revision=revision).config.hidden_size == width
    if revision is None:
        assert config_of(name).hidden_size == width
    if revision or "@" in name:
        assert len(load_tokenizer(name, revision=revision)) == 2


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("own/model@v1", "v1", "revision: 'own/model' has one already, 'v1'"),
        ("own/model", "../../x", "revision: expected a commit, a tag or a branch, got '../../x'"),
        ("own/model@", None, "revision: expected a commit, a tag or a branch, got ''"),
        ("own/model", "v2", "own/model at v2: no such directory, and the hub does not give it"),
        ("own/mo del@v1", None, "no name on the hub: expected owner/name"),
    ],
)
def test_what_is_no_revision(cache: Path, name: str, revision: str | None, message: str):
    for load in (polyformer.from_pretrained, load_tokenizer):
        with pytest.raises(InputError) as caught:
            load(name, revision=revision)
        assert message in str(caught.value)


def test_a_directory_has_no_revision(cache: Path, tmp_path: Path):
    folder = shutil.copytree(cache / "models--own--model" / "snapshots" / OLD, tmp_path / "own")
    for load in (polyformer.from_pretrained, load_tokenizer):
        with pytest.raises(InputError, match=r"revision: .*/own is on this machine and has none"):
            load(folder, revision="v1")


def test_commands_and_recipes_name_a_revision(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name, width in (("own/model", 32), ("own/model@v1", 16), (f"own/model@{OLD}", 16)):
        model = create_model("decoder-tiny", **{**SIZES, "hidden_size": width})
        assert main(["show", name]) == 0
        count = sum(parameter.numel() for parameter in model.parameters())
        assert f"{name}: {count:,} parameters" in capsys.readouterr().out
        recipe = Recipe.from_dict({"model": {"pretrained": name}})
        assert start_from(recipe.model.pretrained or "", model).copied
