"""Question answering over padded batches: losses, logits and gradients of transformers' own models."""

from typing import Any

import pytest
import torch
from twins import CLASSES, texts, twins

from polyformer.core.errors import InputError
from polyformer.models.checkpoints.save import find_family, to_hub_tensors
from polyformer.models.checkpoints.tensors import resolve_prefix

SPANS = [case for case in CLASSES if "QuestionAnswering" in case[1]]
FLOAT32 = (
    *("gptj", "gpt_neo", "llama", "longformer", "mistral", "modernbert", "qwen2", "qwen3", "qwen3_next"),
    *("qwen3_5_moe_text", "qwen3_5_text", "t5", "xlm"),
)
"""Families of which theirs computes parts in float32."""

UNIFORM: dict[str, tuple[str, ...]] = {
    "deberta": ("left", "right"),
    "deberta-v2": ("left", "right"),
    "gpt_neo": ("left", "right"),
    "gptj": ("left",),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), ("left", "right")),
}
"""Where theirs computes something else at a padded token, which may attend to none: the mean of all tokens,
or what its linear layers have in their states."""

ROWS, LENGTH = 8, 40
LENGTHS = torch.tensor([40, 33, 21, 18, 16, 15, 14, 20])  # enough padding to be left out elsewhere
PLACES = {
    "start_positions": torch.tensor([3, 12, 99, 30, 0, 5, 8, 11]),
    "end_positions": torch.tensor([7, 14, 40, 99, 99, 39, 9, 12]),
}


def batch(family: str, side: str, pad: int) -> dict[str, torch.Tensor]:
    mask = (torch.arange(LENGTH) < LENGTHS[:, None]).long()
    mask = mask if side == "right" else mask.flip(1)
    ids = texts(ROWS, LENGTH)
    ends = {"t5": 1, "xlm": 1, "longformer": 7}
    for row, real in zip(ids, mask):
        places = real.nonzero()[:, 0]
        row[places[-1]] = ends.get(family, 2)
        if family == "longformer":
            row[places[[2, 3, 5]]] = 2
    return {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}


def outcome(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    model.zero_grad()
    output = model(**{name: tensor.clone() for name, tensor in inputs.items()})
    output.loss.backward()
    return output


def gradients(ours: Any, theirs: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """By their names; 0 where there is none."""
    family, _, task = find_family(ours.model.config)
    own = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in ours.model.named_parameters()
    }
    wanted = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in theirs.named_parameters()
    }
    tensors = to_hub_tensors(family, ours.model.config, task, own)
    return {resolve_prefix(name, family.prefixes, wanted): tensor for name, tensor in tensors.items()}, wanted


@pytest.mark.parametrize(("family", "task"), SPANS)
def test_padded_batches(family: str, task: str):
    ours, theirs = twins(family, task)
    for side in ("right", "left"):
        inputs = batch(family, side, theirs.config.pad_token_id or 0) | PLACES
        actual, expected = outcome(ours, inputs), outcome(theirs, inputs)
        real = inputs["attention_mask"].bool()
        close = {"rtol": 0, "atol": 2e-6 if family in FLOAT32 or "deberta" in family else 1e-10}
        for name in ("start_logits", "end_logits"):
            torch.testing.assert_close(actual[name][real], expected[name][real], **close)
        if side in UNIFORM.get(family, ()):
            assert not torch.allclose(actual.start_logits[~real], expected.start_logits[~real], atol=1e-3)
            continue
        for name in ("loss", "start_logits", "end_logits"):
            torch.testing.assert_close(actual[name], expected[name], **close, check_dtype=False)
        has, wanted = gradients(ours, theirs)
        for name in wanted:
            torch.testing.assert_close(
                has[name], wanted[name], **close, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
def test_the_mean_of_every_part_of_a_batch(family: str):
    ours, theirs = twins(family, "ForQuestionAnswering")
    inputs = (
        batch(family, "right", theirs.config.pad_token_id) | PLACES | {"num_items_in_batch": torch.tensor(11)}
    )
    torch.testing.assert_close(outcome(ours, inputs).loss, outcome(theirs, inputs).loss)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_tokens_that_see_nothing(attention: str):
    ours, theirs = twins("gpt2", "ForQuestionAnswering", attn_implementation=attention)
    inputs = batch("gpt2", "left", 0) | PLACES
    same = torch.allclose(outcome(ours, inputs).loss, outcome(theirs, inputs).loss, rtol=0, atol=1e-10)
    assert same == (attention == "sdpa")


def test_positions_before_the_text_are_for_padding_alone():
    ours, _ = twins("roberta", "ForQuestionAnswering")
    inputs = batch("roberta", "left", 1)
    places = torch.arange(LENGTH).expand(ROWS, LENGTH) - 1
    with pytest.raises(InputError, match="position_ids: expected 0 or more, got -1"):
        ours.model(**inputs, position_ids=places)
    with pytest.raises(InputError, match="position_ids: expected 0 or more, got -4"):
        ours.model(**inputs, position_ids=places - 3)
