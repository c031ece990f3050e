"""What `save_pretrained` of wrapped models takes: all that transformers' own does, and nothing unread."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from twins import transformers, twins

from polyformer.core.errors import InputError


@pytest.fixture(scope="module")
def model() -> Any:
    return twins("bert", "ForMaskedLM", torch.float32)[0]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_every_argument_of_transformers_is_taken(model: Any, tmp_path: Path):
    names = inspect.signature(transformers.PreTrainedModel.save_pretrained).parameters
    usual = {
        name: parameter.default
        for name, parameter in names.items()
        if parameter.default is not parameter.empty
    }
    model.save_pretrained(tmp_path, **usual, safe_serialization=True, save_function=torch.save)
    assert "model.safetensors" in files(tmp_path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"is_main_process": False}, set()),
        ({"variant": "fp16"}, {"model.fp16.safetensors"}),
        ({"max_shard_size": 4096}, {"model.safetensors.index.json"}),
    ],
    ids=lambda value: next(iter(value), ""),
)
def test_arguments_do_what_they_say(model: Any, tmp_path: Path, options: dict[str, Any], expected: set[str]):
    model.save_pretrained(tmp_path / "out", **options)
    assert expected <= files(tmp_path / "out")
    assert "model.safetensors" not in files(tmp_path / "out")


def test_a_state_dict_takes_the_place_of_the_models_own(model: Any, tmp_path: Path):
    tensors = {name: torch.full_like(tensor, 0.5) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=tensors)
    assert all((tensor == 0.5).all() for tensor in load_file(tmp_path / "model.safetensors").values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"safe_serialization": False}, "safe_serialization: weights are always written as safetensors"),
        ({"max_shard_sise": "1GB"}, "did you mean 'max_shard_size'"),
    ],
)
def test_what_would_be_passed_over_is_refused(
    model: Any, tmp_path: Path, options: dict[str, Any], message: str
):
    with pytest.raises(InputError, match=message):
        model.save_pretrained(tmp_path / "out", **options)
    assert not files(tmp_path / "out")
