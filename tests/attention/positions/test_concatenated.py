"""Concatenated positions: [x ; s] and what a linear map makes of it, with and without a matrix of its own."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import polyformer
from polyformer.attention.positions import (
    ConcatenatedConfig,
    LearnedConfig,
    PositionConfig,
    Shape,
    SinusoidalConfig,
    sinusoids,
)
from polyformer.attention.positions.added import Concatenated
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints.convert import convert

WIDTH = 6


def built(config: ConcatenatedConfig, hidden: int = 8, size: int | None = None) -> Concatenated:
    torch.manual_seed(0)
    return config.build(Shape(hidden_size=hidden, embedding_size=size, max_positions=10)).double()


def tokens(width: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 3, width).double(), torch.tensor([[0, 1, 2], [7, 0, 9]])


def test_a_linear_map_of_a_concatenation_is_a_sum_of_two_maps():
    position = built(ConcatenatedConfig(width=WIDTH))
    x, pos = tokens()
    of_tokens, of_positions = position.projection.weight.split([8, WIDTH], 1)
    expected = x @ of_tokens.T + sinusoids(pos, WIDTH) @ of_positions.T
    torch.testing.assert_close(position.embed(x, pos, 0), expected, rtol=1e-12, atol=1e-12)
    assert position.embed(x, pos, 1) is x


@pytest.mark.parametrize("vectors", [SinusoidalConfig(offset=2), LearnedConfig(offset=2)])
def test_adding_is_the_case_of_two_identities(vectors: PositionConfig):
    position = built(ConcatenatedConfig(width=8, vectors=vectors))
    x, pos = tokens()
    with torch.no_grad():
        position.projection.weight.copy_(torch.eye(8).repeat(1, 2))
    added = position.vectors.embed(x, pos, 0)
    torch.testing.assert_close(position.embed(x, pos, 0), added, rtol=1e-12, atol=1e-12)


def test_there_is_no_matrix_where_token_vectors_leave_room():
    position = built(ConcatenatedConfig(width=WIDTH), hidden=8 + WIDTH, size=8)
    x, pos = tokens()
    assert list(position.parameters()) == []
    assert torch.equal(position.embed(x, pos, 0), torch.cat([x, sinusoids(pos, WIDTH)], -1))


def decoder(vectors: str = "sinusoidal", **changes: object) -> Transformer:
    torch.manual_seed(0)
    return polyformer.create_model(
        "decoder-tiny",
        num_hidden_layers=2,
        vocab_size=50,
        hidden_size=32,
        max_position_embeddings=16,
        position=f"concatenated(width=8, vectors={vectors})",
        **{"attention.num_attention_heads": 2, **changes},
    ).eval()


@pytest.mark.parametrize("vectors", ["sinusoidal", "learned"])
def test_a_decoder_with_a_narrow_table_sees_both_side_by_side(vectors: str, tmp_path: Path):
    """In one pass, by steps, from files; what comes in is the token's vector and the position's."""
    model = decoder(vectors, **{"embedding.size": 24, "embedding.tied": False})
    assert (model.tokens.weight.shape, model.head.weight.shape) == ((50, 24), (50, 32))
    assert isinstance(model.decoder_embedding.widen, nn.Identity)
    ids = torch.randint(0, 50, (2, 9))
    output = model(ids, output_hidden_states=True)
    assert torch.equal(output.hidden_states[0][..., :24], model.tokens(ids))
    read = model(ids[:, :4], use_cache=True)
    for t in range(4, 9):
        read = model(ids[:, t : t + 1], state=read.state, use_cache=True)
        torch.testing.assert_close(read.logits[:, 0], output.logits[:, t], rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(polyformer.from_pretrained(tmp_path)(ids).logits, output.logits)


def test_a_norm_of_the_embedding_is_of_what_the_layers_read():
    model = decoder(**{"embedding.size": 20, "embedding.tied": False, "embedding.normed": True})
    assert model.decoder.position.projection.weight.shape == (32, 28)
    assert model.decoder_embedding.norm.weight.shape == (32,)
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.isfinite().all()


def test_learned_positions_end_and_are_extended():
    model = decoder("learned")
    ids = torch.randint(0, 50, (1, 20))
    with pytest.raises(InputError, match="longer than the 16 learned positions"):
        model(ids)
    longer, _ = convert(model, max_positions=32)
    table = longer.decoder.position.vectors.tables[0].weight
    assert torch.equal(table, model.decoder.position.vectors.tables[0].weight.repeat(2, 1))
    assert torch.equal(longer.eval()(ids[:, :16]).logits, model(ids[:, :16]).logits)
    assert longer(ids).logits.shape == (1, 20, 50)


@pytest.mark.parametrize("kind", ["rope", "learned_per_layer", "none", "concatenated", "deberta"])
def test_what_has_no_vector_for_a_position_is_refused(kind: str):
    with pytest.raises(
        InputError, match=f"vectors: expected .* axial, grid, learned, sinusoidal; got '{kind}'"
    ):
        ConcatenatedConfig.from_dict({"kind": "concatenated", "vectors": kind})


def test_a_position_without_a_channel_is_refused():
    with pytest.raises(InputError, match="width: expected 1 or more"):
        ConcatenatedConfig(width=0)
