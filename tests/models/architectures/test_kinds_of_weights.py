"""The kinds of weights: loading, saving, and the command line."""

import copy
from pathlib import Path

import pytest
import torch

import polyformer
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.models import transformers as hub
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.weights import computes_bfloat16, with_weights
from polyformer.models.checkpoints.load import start_from

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 300}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = polyformer.create_model("gpt2", **SIZES, max_position_embeddings=40)
    model.save_pretrained(tmp_path / "float")
    return tmp_path / "float"


QUANTIZED = pytest.mark.parametrize("weights", ["int8", "int4"])


@QUANTIZED
def test_a_model_is_read_in_each_kind_and_back(folder: Path, tmp_path: Path, weights: str):
    own = polyformer.from_pretrained(folder)
    rounded = polyformer.from_pretrained(folder, weights=weights)
    assert rounded.config.weights == weights
    rounded.save_pretrained(tmp_path / weights)
    size, whole = ((path / "model.safetensors").stat().st_size for path in (tmp_path / weights, folder))
    assert size < 0.4 * whole
    assert polyformer.from_pretrained(tmp_path / weights).config == rounded.config
    back = polyformer.from_pretrained(tmp_path / weights, weights="float32")
    step = 1 / 250 if weights == "int8" else 1 / 14
    assert back.config == own.config
    assert all(parameter.requires_grad for parameter in back.parameters())
    for name, tensor in own.state_dict().items():
        assert float((back.state_dict()[name] - tensor).abs().max()) <= float(tensor.abs().max()) * step
    with pytest.raises(InputError, match=r"weights.*int9"):
        polyformer.from_pretrained(folder, weights="int9")


@pytest.mark.filterwarnings("ignore:this CPU has no bfloat16")
def test_bfloat16_is_the_type_of_all_that_floats(folder: Path, monkeypatch: pytest.MonkeyPatch):
    model = polyformer.from_pretrained(folder, weights="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    if not torch.cuda.is_available():
        assert not computes_bfloat16()
        with pytest.warns(UserWarning, match="no bfloat16"):
            with_weights(model, "bfloat16")


@QUANTIZED
def test_a_quantized_model_generates_what_its_weights_in_float_do(folder: Path, weights: str):
    rounded = polyformer.from_pretrained(folder, weights=weights)
    plain = with_weights(rounded, "float32")
    ids = torch.arange(24).view(3, 8)
    with torch.no_grad():
        labels = {"input_ids": ids, "labels": ids}
        torch.testing.assert_close(rounded(**labels).loss, plain(**labels).loss, rtol=1e-2, atol=1e-2)
    out = rounded.generate(ids, max_new_tokens=20)
    twin = copy.deepcopy(rounded).generate(ids, max_new_tokens=20)
    assert torch.equal(out.sequences, twin.sequences)
    alone = rounded.generate(ids[1:2], max_new_tokens=20)
    assert torch.equal(alone.sequences[0], out.sequences[1]), "a row of a batch is generated as if alone"


@QUANTIZED
def test_what_a_quantized_model_cannot_is_said(folder: Path, tmp_path: Path, weights: str):
    model = polyformer.from_pretrained(folder, weights=weights)
    with pytest.raises(InputError, match="convert the result"):
        model.train()
    with pytest.raises(InputError, match="weights float32"):
        model.save_pretrained(tmp_path / "hub", format="hub")
    with pytest.raises(InputError, match=f"this model has {weights} weights"):
        polyformer.models.checkpoints.convert(model, "Window(4)")
    with pytest.raises(InputError, match="wrap"):
        hub.wrap(model)
    assert not (tmp_path / "hub").exists()
    model.save_pretrained(tmp_path / weights)
    with pytest.raises(InputError, match="cannot be trained"):
        start_from(tmp_path / weights, Transformer.from_pretrained(folder))
    with pytest.raises(InputError, match=r"'stored' keeps .* GGUF"):
        polyformer.from_pretrained(folder, weights="stored")


def test_a_quantized_model_is_rounded_to_another_kind(folder: Path):
    other = with_weights(polyformer.from_pretrained(folder, weights="int8"), "int4")
    assert other.config.weights == "int4"
    assert {module.__class__.__name__ for module in other.modules()} >= {"Int4Linear", "Int8Embedding"}


@QUANTIZED
def test_convert_writes_quantized_weights_and_back(
    folder: Path, tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str]
):
    small, back = tmp_path / "small", tmp_path / "back"
    assert main(["convert", str(folder), str(small), "--weights", weights]) in (0, None)
    assert Transformer.from_pretrained(small).config.weights == weights
    assert main(["show", str(small)]) in (0, None)
    assert f"weights in {weights}" in capsys.readouterr().out
    assert main(["convert", str(small), str(tmp_path / "hub"), "--format", "hub"]) == 2
    assert main(["convert", str(small), str(back), "--weights", "float32", "--format", "hub"]) in (0, None)
    assert polyformer.from_pretrained(back).config.weights is None
