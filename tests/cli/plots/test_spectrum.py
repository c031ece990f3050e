"""Spectra against matrices of known singular values, numpy, and what a model records."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import LinformerConfig, MemoryCompressedConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.cli.plots.model import (
    Spectrum,
    draw_spectra,
    matrices,
    shares,
    spectra,
    spectrum_csv,
    spectrum_table,
)
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model

MEMBERS = [kind for kind in MechanismConfig.kinds.values() if issubclass(kind, MechanismConfig)]


def attention(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).softmax(-1)


def model(name: str, **changes: object) -> Transformer:
    torch.manual_seed(0)
    return create_model(name, vocab_size=30, hidden_size=16, num_attention_heads=2, **changes).double()


def ids(number: int, length: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": row} for row in torch.randint(30, (number, 1, length))]


def test_a_matrix_of_rank_1_has_all_at_its_first_value():
    rows = torch.full((3, 8, 8), 1 / 8)  # every token looks everywhere alike
    assert torch.allclose(shares(rows), torch.ones(3, 8, dtype=torch.float64), rtol=0, atol=1e-7)


def test_the_identity_is_a_straight_line():
    line = torch.arange(1, 9, dtype=torch.float64) / 8
    assert torch.allclose(shares(torch.eye(8)), line, rtol=0, atol=1e-14)


def test_known_values_in_any_order():
    assert torch.allclose(
        shares(torch.diag(torch.tensor([1.0, 4, 0, 3]))),
        torch.tensor([4, 7, 8, 8]).double() / 8,
        rtol=0,
        atol=1e-14,
    )


def test_zeros_are_no_nan():
    assert shares(torch.zeros(2, 5, 5)).tolist() == [[1.0] * 5] * 2


def test_shares_are_those_of_numpy():
    heads = attention(2, 7, 7)
    for matrix, curve in zip(heads, shares(heads)):
        values = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
        assert np.allclose(curve, np.cumsum(values) / values.sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("length", "quarter"), [(4, 1), (7, 1), (8, 2), (512, 128)])
def test_a_quarter_counts_values(length: int, quarter: int):
    """Of the identity the greatest n / 4 hold n / 4 of n: the index counts from one."""
    result = Spectrum(shares(torch.eye(length)[None, None]), 1)
    assert result.quarter == quarter
    assert math.isclose(result.at_quarter.item(), quarter / length, abs_tol=1e-12)


@pytest.mark.parametrize("name", ["encoder-tiny", "decoder-tiny"])
def test_a_model_is_seen_as_it_attends(name: str):
    network, rows = model(name, num_hidden_layers=2, dropout=0.5).train(), ids(3, 9)
    [(side, result)] = spectra(network, rows).items()
    assert side == name.removesuffix("-tiny")
    assert network.training
    network.eval()
    seen = [network(**row, output_attentions=True).attentions for row in rows]
    expected = torch.stack([torch.stack([shares(layer[0]) for layer in layers]) for layers in seen]).mean(0)
    assert result.curves.shape == (2, 2, 9)
    assert torch.allclose(result.curves, expected, rtol=0, atol=1e-12)


def test_an_encoder_decoder_has_two_and_none_across():
    network = model("transformer-tiny", num_hidden_layers=2)
    row = {"input_ids": torch.randint(30, (1, 9)), "decoder_input_ids": torch.randint(30, (1, 6))}
    result = spectra(network, [row])
    assert {side: result.length for side, result in result.items()} == {"encoder": 9, "decoder": 6}
    for layer in matrices(network.eval(), row)["decoder"]:
        assert torch.equal(layer, layer.tril())
        assert torch.allclose(layer.sum(-1), torch.ones(2, 6).double())


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.kind)
def test_members_say_whether_they_have_a_matrix(member: type[MechanismConfig]):
    for example in member.examples():
        network = model("encoder-tiny", attention=example).eval()
        refused = {"gated_convolution": "a gated convolution weights each channel"}.get(member.kind)
        if getattr(example, "steps", 1) > 1:
            refused = "a token of several steps has a value for each of them"
        if refused is not None:
            with pytest.raises(InputError, match=f"output_attentions: {refused}"):
                network(**ids(1, 12)[0], output_attentions=True)
            assert not example.pairs
            continue
        seen = network(**ids(1, 12)[0], output_attentions=True).attentions
        assert len(seen) == 1
        assert (seen[0].shape[-2:] == (12, 12)) == example.pairs


@pytest.mark.parametrize("member", [LinformerConfig(max_length=16, k=4), MemoryCompressedConfig()])
def test_mechanisms_without_a_matrix_are_refused(member: MechanismConfig):
    message = (
        f"mechanism '{member.kind}' has no attention matrix .* these have one: .*'performer', .*'softmax'"
    )
    with pytest.raises(InputError, match=message) as caught:
        spectra(model("encoder-tiny", attention=member), ids(1, 8))
    assert str(caught.value).count(repr(member.kind)) == 1


def test_too_few_tokens_are_refused():
    with pytest.raises(InputError, match="length: expected 4 tokens or more, got 3"):
        spectra(model("encoder-tiny"), ids(1, 3))


def test_table_csv_and_figure(tmp_path: Path):
    line = shares(torch.eye(8))
    result = Spectrum(torch.stack([torch.stack([line, line]), torch.ones(2, 8).double()]), 1)
    table = [row.split() for row in spectrum_table(result).split("\n")]
    assert table == [
        ["layer", "head", "0", "head", "1", "mean"],
        ["0", *["0.2500"] * 3],
        ["1", *["1.0000"] * 3],
    ]
    rows = spectrum_csv({"encoder": result}).splitlines()
    assert (len(rows), rows[:2]) == (1 + 2 * 2 * 8, ["stack,layer,head,index,share", "encoder,0,0,1,0.125"])
    assert rows[-1] == "encoder,1,1,8,1"
    pytest.importorskip("matplotlib")
    draw_spectra({"encoder": result, "decoder": result}, "two stacks", tmp_path / "a.png", atomic_write)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
