"""What a model is called with: shapes, types and values that cannot be meant are refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.architectures import TrajectoryConfig, TrajectoryTransformer
from polyformer.models.presets import create_model

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 50,
    "max_position_embeddings": 20,
}
IDS = torch.arange(10).view(2, 5)
ONES = torch.ones(2, 5)
MODELS = {
    "encoder": create_model("bert-base", **SIZES).eval(),
    "decoder": create_model("gpt2", **SIZES).eval(),
    "both": create_model("bart-base", **SIZES).eval(),
}
SHAPE, VALUES = "expected the shape", "expected 1 for tokens that count and 0 for others"

BAD_MASKS: list[tuple[Any, str]] = [
    (torch.ones(5), SHAPE),
    (torch.ones(()), SHAPE),
    (torch.ones(2, 7), SHAPE),
    (torch.ones(1, 5), SHAPE),
    (torch.ones(2, 1, 5, 5), SHAPE),
    (0.5 * ONES, VALUES),
    (-ONES.long(), VALUES),
    (2 * ONES.long(), VALUES),
    (ONES * float("nan"), VALUES),
    (torch.tensor([[0.0, 0.0, 0.0, -torch.inf, -torch.inf]] * 2), VALUES),
    (torch.tensor([[0.0, 0.0, 0.0, 0.0, torch.finfo().min]] * 2), "a mask to be added to the scores"),
    ([[1] * 5] * 2, "expected a tensor, got list"),
]


def call(name: str, **options: Any) -> Tensor:
    if name == "both":
        options = {"decoder_input_ids": IDS, **options}
    return MODELS[name](**{"input_ids": IDS, **options}).logits


def refused(name: str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(name, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("mask", "message"), BAD_MASKS)
def test_a_mask_that_is_none(name: str, mask: Any, message: str):
    said = refused(name, attention_mask=mask)
    assert said.startswith("attention_mask: ")
    assert message in said
    if name == "both":
        assert refused(name, decoder_attention_mask=mask).startswith("decoder_attention_mask: ")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.uint8, torch.float32, torch.float16])
def test_a_mask_of_ones_and_zeros_in_any_type(name: str, dtype: torch.dtype):
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, 3:] = 0
    torch.testing.assert_close(call(name, attention_mask=mask.to(dtype)), call(name, attention_mask=mask))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (-ONES.long(), "position_ids: expected 0 or more, got -1"),
        (ONES, "position_ids: expected integers of 32 or 64 bits, got torch.float32"),
        (torch.arange(7), r"position_ids: expected the shape (2, 5) or (5,), got (7,)"),
        (torch.tensor(1), "position_ids: expected the shape"),
        (torch.ones(2, 5, 1).long(), "position_ids: expected the shape"),
        (2**40 * ONES.long(), "longer than the 20 learned positions"),
    ],
)
def test_positions_that_are_none(name: str, positions: Tensor, message: str):
    assert message in refused(name, position_ids=positions)


def test_numbers_of_documents_and_types():
    assert "document_ids: expected integers of 32 or 64 bits" in refused("decoder", document_ids=ONES)
    assert "document_ids: expected 0 or more, got -1" in refused("decoder", document_ids=-ONES.long())
    assert "segment_ids: expected the shape" in refused("decoder", segment_ids=torch.ones(3, 5).long())
    assert "token_type_ids: expected integers" in refused("encoder", token_type_ids=ONES)
    assert "token_type_ids: expected the shape" in refused("encoder", token_type_ids=torch.ones(5).long())


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_labels_that_are_none(name: str):
    assert "input_ids: expected token ids [batch, length], got [[1]]" in refused(name, input_ids=[[1]])
    assert "labels: expected" in refused(name, labels=torch.ones(5).long())
    assert "labels: expected integer" in refused(name, labels=ONES)
    assert "labels: expected integer" in refused(name, labels=ONES.bool())
    assert "labels: expected numbers from 0 to 49" in refused(name, labels=99 * ONES.long())


def test_a_mask_of_a_continued_text_is_of_the_new_tokens_or_of_all():
    model = MODELS["decoder"]
    state = model(IDS, use_cache=True).state
    for length in (5, 10):
        assert model(IDS, attention_mask=torch.ones(2, length), state=state).logits.shape == (2, 5, 50)
    with pytest.raises(InputError, match=r"expected the shape \(2, 5\) or \(2, 10\), got \(2, 9\)"):
        model(IDS, attention_mask=torch.ones(2, 9), state=state)


@pytest.mark.parametrize("mask", [torch.ones(5), 0.5 * ONES, -ONES])
def test_trajectories_are_checked_too(mask: Tensor):
    model = TrajectoryTransformer(TrajectoryConfig.examples()[0]).eval()
    config = model.config
    tensors = [torch.zeros(2, 5, size) for size in (config.head.state_size, config.head.action_size, 1)]
    with pytest.raises(InputError, match="attention_mask: "):
        model(*tensors, torch.zeros(2, 5, dtype=torch.long), attention_mask=mask)


@pytest.mark.parametrize("head", [{"kind": "tag", "dropout": -1}, {"kind": "classify", "dropout": 1.0}])
def test_a_dropout_of_a_head_that_is_no_probability(head: dict[str, Any]):
    with pytest.raises(InputError, match="dropout: expected a probability"):
        create_model("bert-base", **SIZES, head=head)
