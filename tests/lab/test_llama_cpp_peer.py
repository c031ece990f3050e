"""The GGUF file that llama.cpp is given holds the weights of transformers, as they lie in such files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from polyformer_lab.bench.generation import LAYER, WHOLE, llama_cpp, write_gguf
from polyformer_lab.bench.passes import Pair
from polyformer_lab.bench.rows import AbsentError


@pytest.fixture
def model():
    transformers = pytest.importorskip("transformers")
    shape = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=40, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(shape).eval()


@pytest.mark.parametrize("weights", ["F32", "Q8_0"])
def test_the_file_holds_every_tensor(model, weights: str, tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    write_gguf(model, weights, file)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert len(tensors) == len(model.transformer.state_dict())
    theirs = model.transformer.h[1].mlp.c_fc
    up = tensors[f"blk.1.{LAYER['mlp.c_fc']}.weight"]
    expected = theirs.weight.T.detach().numpy()
    assert up.tensor_type.name == weights
    values = gguf.quants.dequantize(up.data, up.tensor_type)
    np.testing.assert_allclose(values, expected, atol=0 if weights == "F32" else 1e-3)
    bias = tensors[f"blk.1.{LAYER['mlp.c_fc']}.bias"]
    np.testing.assert_array_equal(bias.data, theirs.bias.detach().numpy())
    positions = tensors[f"{WHOLE['wpe']}.weight"]
    np.testing.assert_array_equal(positions.data, model.transformer.wpe.weight.detach().numpy())


def test_the_same_tokens(model):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    write = llama_cpp("F32", Pair(None, model))
    ids = torch.arange(5, 11).view(1, -1)
    theirs = model.generate(ids, do_sample=False, max_new_tokens=4, eos_token_id=None, pad_token_id=0)
    assert torch.equal(write(ids, 4, 1), theirs[:, 6:])
    with pytest.raises(AbsentError, match="one text"):
        write(ids.expand(2, -1), 4, 1)


def test_other_models_are_refused(model):
    model.config.model_type = "t5"
    with pytest.raises(AbsentError, match="GPT-2 on a CPU alone"):
        llama_cpp("F32", Pair(None, model))
