"""Tensors of any shape, type and value in the place of a model's inputs."""

from typing import Any

import torch
from hostile import cases, survives
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyformer.models.presets import create_model

SIZES = {
    **{"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 8},
    **{"vocab_size": 20, "max_position_embeddings": 20},
}
MODELS = {name: create_model(name, **SIZES).eval() for name in ("bert-base", "gpt2", "bart-base", "t5-small")}
NAMES = (
    *(
        "input_ids",
        "attention_mask",
        "position_ids",
        "document_ids",
        "token_type_ids",
        "langs",
        "segment_ids",
    ),
    *("global_attention_mask", "relation_ids", "decoder_input_ids", "decoder_attention_mask", "labels"),
)
SHAPES = (
    (2, 5),
    (2, 5),
    (2, 5),
    (5,),
    (),
    (1, 5),
    (2, 1),
    (2, 6),
    (2, 5, 1),
    (2, 1, 5, 5),
    (2, 5, 5),
    (0, 5),
    (2, 0),
)
DTYPES = (torch.long, torch.long, torch.bool, torch.float32, torch.int8, torch.float16, torch.complex64)
NUMBERS = (0, 1, 1, 1, 2, -1, -100, 19, 20, 2**40, 0.5, float("nan"), float("-inf"))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    filled = torch.full(draw(st.sampled_from(SHAPES)), draw(st.sampled_from(NUMBERS)), dtype=torch.float64)
    if filled.numel() and draw(st.booleans()):
        filled.view(-1)[0] = draw(st.sampled_from(NUMBERS))
    if draw(st.booleans()):
        return filled.nan_to_num(0, 0, 0).to(torch.long)
    return filled.to(draw(st.sampled_from(DTYPES)))


@cases(250)
@given(
    st.sampled_from(sorted(MODELS)),
    st.dictionaries(st.sampled_from(NAMES), tensors() | st.sampled_from([None, 3, [[1]], "x"]), max_size=3),
    st.booleans(),
)
@torch.no_grad()
def test_inputs(name: str, inputs: dict[str, Any], paired: bool):
    ids = torch.arange(10).view(2, 5)
    usual = {"input_ids": ids, "decoder_input_ids": ids} if paired else {"input_ids": ids}
    survives(lambda: MODELS[name](**{**usual, **inputs}).logits)
