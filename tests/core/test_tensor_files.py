"""Files written tensor by tensor are those that safetensors writes at once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polyformer.core.errors import InputError
from polyformer.core.files import TYPES, in_file_order, write_one_by_one


def test_the_bytes_are_the_librarys_own(tmp_path: Path):
    tensors = {
        f"{'zab'[i % 3]}.{i}": torch.arange(4 * i).view(2, -1).to(kind) for i, kind in enumerate(TYPES)
    }
    tensors |= {name: torch.randn(3, 5).bfloat16() for name in ("É", 'a "quoted" \\ name', "")}
    tensors |= {"scalar": torch.tensor(7), "none": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    like = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_one_by_one(tmp_path / "ours", like, (tensors[name] for name in in_file_order(like)))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_one_tensor_is_asked_for_after_the_other_is_written(tmp_path: Path):
    like = {name: torch.zeros(1 << 18) for name in "abc"}
    seen = []

    def numbers():
        for name in in_file_order(like):
            seen.append((tmp_path / "file").stat().st_size >> 20)
            yield like[name]

    write_one_by_one(tmp_path / "file", like, numbers())
    assert seen == [0, 1, 2]


def test_a_type_without_a_name_is_refused_before_anything_is_written(tmp_path: Path):
    like = {"weight": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(
        InputError, match=r"'weight' is of torch.complex128, for which safetensors has no name"
    ):
        write_one_by_one(tmp_path / "file", like, like.values())
    assert not (tmp_path / "file").exists()
