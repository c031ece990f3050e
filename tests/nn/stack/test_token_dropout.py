"""Token dropout: the scaled vectors by their equation, for each document as if it stood alone."""

import pytest
import torch
from torch import Tensor

from polyformer.attention.positions import RopeConfig
from polyformer.attention.positions.base import Shape
from polyformer.core.errors import InputError
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.core.sequence.tokens import ModelInputs
from polyformer.models.presets import create_model
from polyformer.nn.stack import EmbeddingConfig, TokenDropoutConfig

MASK = 3
POSITION = RopeConfig().build(Shape(hidden_size=8, num_heads=2, head_size=4))


def naive(vectors: Tensor, ids: Tensor, rate: float) -> Tensor:
    """A text [T] of vectors [T, E], token by token."""
    masks = int((ids == MASK).sum())
    rows = [
        torch.zeros_like(x) if token == MASK else x * (1 - rate) * len(ids) / (len(ids) - masks)
        for x, token in zip(vectors, ids.tolist())
    ]
    return torch.stack(rows)


def embed(vectors: Tensor, inputs: ModelInputs, rate: float = 0.12) -> Tensor:
    config = EmbeddingConfig(token_dropout=TokenDropoutConfig(mask=MASK, rate=rate))
    module = config.build(8, LayerNormConfig(), 0.0, POSITION).double().eval()
    assert inputs.input_ids is not None
    return module(vectors, POSITION, torch.zeros_like(inputs.input_ids), inputs)


@pytest.mark.parametrize("rate", [0.12, 0.3])
def test_vectors_and_gradients(rate: float):
    ids = torch.tensor([[1, MASK, 4, 5, MASK, 2, 7], [4, 5, 6, 7, 1, 2, 1]])
    vectors = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    actual = embed(vectors, ModelInputs(ids), rate)
    expected = torch.stack([naive(x, row, rate) for x, row in zip(vectors, ids)])
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)
    weights = torch.randn_like(actual)
    (slope,) = torch.autograd.grad((actual * weights).sum(), vectors)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), vectors)
    torch.testing.assert_close(slope, wanted, rtol=1e-14, atol=1e-14)


def test_documents_and_padding():
    ids = torch.tensor([[1, MASK, 4, 5, MASK, 2, 7, MASK, MASK]])
    documents = torch.tensor([[0, 0, 0, 4, 4, 4, 4, 7, 7]])
    valid = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0]])
    vectors = torch.randn(1, 9, 8, dtype=torch.float64)
    actual = embed(vectors, ModelInputs(ids, valid, document_ids=documents))
    for start, stop in ((0, 3), (3, 7)):
        alone = naive(vectors[0, start:stop], ids[0, start:stop], 0.12)
        torch.testing.assert_close(actual[0, start:stop], alone, rtol=1e-14, atol=1e-14)
    assert not actual[0, 7:].any()


def test_a_text_of_masks_is_zero():
    ids = torch.full((1, 4), MASK)
    assert not embed(torch.randn(1, 4, 8).double(), ModelInputs(ids)).any()


def test_vectors_in_place_of_ids_stay():
    inputs = ModelInputs(inputs_embeds=torch.randn(1, 4, 8).double()).with_placeholder_ids()
    assert inputs.inputs_embeds is not None
    assert torch.equal(embed(inputs.inputs_embeds, inputs), inputs.inputs_embeds)


def test_padding_that_is_left_out_changes_nothing():
    """A model packs padded rows as documents where that is faster."""
    torch.manual_seed(0)
    options = {"embedding.token_dropout": {"mask": MASK}, "position": "rope"}
    model = create_model("encoder-tiny", **options).double().eval()
    ids = torch.randint(1, 9, (3, 40))
    mask = (torch.arange(40) < torch.tensor([[40], [7], [2]])).long()
    together = model(ids, mask).last_hidden_state
    model.unpads = False
    apart = model(ids, mask).last_hidden_state
    torch.testing.assert_close(together[mask.bool()], apart[mask.bool()], rtol=1e-10, atol=1e-10)
    for row, length in enumerate((40, 7, 2)):
        alone = model(ids[row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(apart[row, :length], alone[0], rtol=1e-10, atol=1e-10)


def test_a_decoder_cannot_have_it():
    with pytest.raises(InputError, match=r"embedding\.token_dropout: vectors depend on all masks"):
        create_model("decoder-tiny", **{"embedding.token_dropout": {"mask": 1}})
