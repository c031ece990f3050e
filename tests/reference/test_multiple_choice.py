"""Every family's class of multiple choice in transformers and ours, loaded from its files and saved back."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from families import counted, same, texts, verify  # noqa: E402
from tiny import TINY  # noqa: E402

import polyformer  # noqa: E402
from polyformer import hub  # noqa: E402
from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402

TASK = "ForMultipleChoice"
NAMES = [name for name in FAMILIES if TASK in FAMILIES[name].tasks]
MORE: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "electra": {"summary_activation": "tanh"},
    "modernbert": {"classifier_pooling": "mean", "classifier_bias": True},
}
BEHIND_PADDING = ("roberta", "xlm-roberta", "longformer")
"""Families that count positions over what is not padding themselves."""
IN_FLOAT32 = ("deberta-v2", "longformer", "modernbert")
"""Families that compute scale, softmax or angles in float32."""
SEPARATOR = 2


def model_of(name: str, **options: Any) -> Any:
    kind = getattr(transformers, FAMILIES[name].class_prefix + TASK)
    torch.manual_seed(7)
    return kind(kind.config_class(**{**TINY[name], **MORE.get(name, {}), **options}))


def questions(pad: int, lengths: tuple[int, ...] = (11, 8, 7, 9, 11, 10)) -> dict[str, torch.Tensor]:
    """Two questions of three choices each, of different lengths; three separators in each."""
    inputs = texts(23, lengths, pad=pad)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    ids[ids == SEPARATOR] = 5
    ids[:, 2:4] = SEPARATOR
    ids[torch.arange(6), mask.sum(1) - 1] = SEPARATOR
    return {name: tensor.unflatten(0, (2, 3)) for name, tensor in inputs.items()}


def test_the_families_that_have_it():
    assert {"albert", "bert", "big_bird", "deberta-v2", "distilbert", "electra", "longformer"} < {*NAMES}
    assert {"modernbert", "roberta", "xlm-roberta"} < {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_multiple_choice(name: str, tmp_path: Path):
    state = np.random.get_state()  # BigBird's seeds it in every layer
    theirs = model_of(name)
    whole = ((16,) * 6,) if name == "longformer" else ()  # theirs has NaN among gradients of padded choices
    inputs = questions(theirs.config.pad_token_id, *whole)
    width = inputs["input_ids"].shape[-1]
    if getattr(theirs.config, "type_vocab_size", 0):
        inputs["token_type_ids"] = (torch.arange(width) > 3).long().expand(2, 3, -1)
    mask = inputs["attention_mask"].flatten(0, 1)
    positions = {"position_ids": counted(mask).unflatten(0, (2, 3))}
    takes = name not in (*BEHIND_PADDING, "distilbert")
    ours = verify(
        theirs,
        inputs,
        tmp_path,
        labels={"labels": torch.tensor([2, 0])},
        only_theirs=positions if takes else None,
        mask=mask,
        tolerance=1e-5 if name in IN_FLOAT32 else 1e-10,
    )
    assert ours(**inputs).logits.shape == (2, 3)
    np.random.set_state(state)


def test_a_choice_without_a_token_is_none():
    ours = polyformer.checkpoints.from_transformers(model_of("bert").eval())
    inputs = questions(0)
    expected = ours(**{name: tensor[1:, :2] for name, tensor in inputs.items()}, labels=torch.tensor([0]))
    inputs["attention_mask"][1, 2] = 0
    actual = ours(**inputs, labels=torch.tensor([-100, 0]))
    assert actual.logits[1, 2] == -torch.inf
    torch.testing.assert_close(actual.loss, expected.loss)
    actual.loss.backward()
    assert all(weight.grad.isfinite().all() for weight in ours.parameters() if weight.grad is not None)


@torch.no_grad()
def test_one_question_is_its_rows_and_vectors_are_its_ids():
    ours = polyformer.checkpoints.from_transformers(model_of("bert").eval())
    inputs = questions(0)
    expected = ours(**inputs).logits
    alone = ours(**{name: tensor[1] for name, tensor in inputs.items()}).logits
    torch.testing.assert_close(alone, expected[1:])
    vectors = {"inputs_embeds": ours.tokens(inputs["input_ids"]), "attention_mask": inputs["attention_mask"]}
    torch.testing.assert_close(ours(**vectors).logits, expected)


def test_transformers_loads_what_was_wrapped(tmp_path: Path):
    theirs = model_of("roberta").eval()
    wrapped = hub.wrap(polyformer.checkpoints.from_transformers(theirs))
    wrapped.save_pretrained(tmp_path)
    again = transformers.AutoModelForMultipleChoice.from_pretrained(tmp_path)
    inputs = questions(1)
    labels = torch.tensor([2, 0])
    actual, expected = again(**inputs, labels=labels), theirs(**inputs, labels=labels)
    same(actual.logits, expected.logits, 1e-5)
    same(actual.loss, expected.loss, 1e-5)
    with pytest.raises(InputError, match=r"input_ids: expected \[batch, choices, length\]"):
        again(inputs["input_ids"][0])


def test_what_is_not_computed_is_refused_by_name():
    with pytest.raises(InputError, match="summary_type is 'mean'"):
        FAMILIES["electra"].config({**TINY["electra"], "summary_type": "mean"}, TASK)
    with pytest.raises(InputError, match="text: expected the head 'classify' of one label"):
        polyformer.heads.ChooseConfig(text=polyformer.heads.TagConfig())
    with pytest.raises(InputError, match="got 3 labels"):
        polyformer.heads.ChooseConfig(text=polyformer.heads.ClassifyConfig(num_labels=3))
