"""BigBird with every head, loaded from transformers' files and saved back; test_bigbird has random blocks."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyformer
from polyformer import hub
from polyformer.checkpoints import FAMILIES
from polyformer.core.errors import InputError
from polyformer.model import Transformer

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from families import counted, same, shaken, texts, verify  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
    "block_size": 2,
    "num_random_blocks": 1,
}
CONFIGS: list[dict[str, Any]] = [
    {"attention_type": "original_full"},
    {"use_bias": False, "rescale_embeddings": True, "hidden_act": "relu", "tie_word_embeddings": False},
    {"attention_type": "original_full", "num_attention_heads": 2, "type_vocab_size": 3, "pad_token_id": 2},
]
TOKENS = torch.full((3, 11), -100)
TOKENS[0, 3], TOKENS[1, 0], TOKENS[2, 2] = 5, 22, 0
HEADS: dict[str, Any] = {
    "Model": ({}, None, None),
    "ForMaskedLM": ({}, {"labels": TOKENS}, None),
    "ForPreTraining": (
        {},
        {"labels": TOKENS, "sentence_labels": torch.tensor([0, 1, 1])},
        {"labels": TOKENS, "next_sentence_label": torch.tensor([0, 1, 1])},
    ),
    "ForSequenceClassification": ({"num_labels": 3}, {"labels": torch.tensor([2, 0, 1])}, None),
    "ForTokenClassification": ({"num_labels": 4}, {"labels": TOKENS.clamp_max(3)}, None),
}
POOLER = ("bert.pooler.weight", "bert.pooler.bias")
"""What classes that pool nothing have all the same."""


@pytest.fixture(autouse=True)
def numpy_state() -> Iterator[None]:
    """Theirs seeds numpy's global generator in every layer."""
    state = np.random.get_state()
    yield
    np.random.set_state(state)


def model_of(head: str, **options: Any) -> Any:
    return getattr(transformers, f"BigBird{head}")(transformers.BigBirdConfig(**{**SIZES, **options}))


@pytest.mark.parametrize("config", range(len(CONFIGS)))
@pytest.mark.parametrize(("head", "side"), [*((item, "right") for item in HEADS), ("ForMaskedLM", "left")])
def test_bigbird(head: str, config: int, side: str, tmp_path: Path):
    """Full attention, and blocks in texts that theirs sees whole."""
    options, labels, their_labels = HEADS[head]
    theirs = model_of(head, **CONFIGS[config], **options)
    inputs = texts(23, pad=theirs.config.pad_token_id, side=side)
    inputs["token_type_ids"] = (torch.arange(11) % 3 == 1).long().expand(3, -1)
    if labels is not None and labels["labels"].dim() == 2:
        real = labels["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
        labels = {**labels, "labels": real}
        their_labels = None if their_labels is None else {**their_labels, "labels": real}
    dead = POOLER if head not in ("Model", "ForPreTraining") else ()
    if head in ("ForMaskedLM", "ForPreTraining") and not theirs.config.tie_word_embeddings:
        dead = (*dead, "cls.predictions.bias")
    verify(
        theirs,
        inputs,
        tmp_path,
        labels=labels,
        their_labels=their_labels,
        dead=dead,
        only_theirs={"position_ids": counted(inputs["attention_mask"])},
    )


def test_theirs_counts_the_first_block_for_each_random_one(tmp_path: Path):
    """In evaluation; ours draws random blocks there too, and its short texts do not depend on long ones."""
    theirs: Any = shaken(model_of("ForMaskedLM", num_random_blocks=2))
    theirs.save_pretrained(tmp_path)
    ours = polyformer.from_pretrained(tmp_path)
    long, short = texts(23, (30, 30)), texts(23, (18, 11))
    mine, other = (item(**long).logits for item in (ours, theirs))
    assert (mine - other).abs().max() > 1e-3
    assert theirs.bert.attention_type == "block_sparse"
    weights = ours(**long, output_attentions=True).attentions
    assert weights is not None
    assert all((tensor == 0).any() for tensor in weights)
    real = short["attention_mask"].bool()
    same(ours(**short).logits[real], theirs(**short).logits[real])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"is_decoder": True}, "Model", "is_decoder"),
    ({"attention_type": "other"}, "Model", "attention_type"),
    ({"num_random_blocks": 0}, "Model", "num_random_blocks"),
]


@pytest.mark.parametrize(("options", "task", "name"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(options: dict[str, Any], task: str, name: str):
    with pytest.raises(InputError, match=name):
        FAMILIES["big_bird"].config({**SIZES, **options}, task)


@pytest.mark.parametrize("options", [{"hidden_act": "relu"}, {"attention_type": "original_full"}])
def test_answers_behind_the_question(options: dict[str, Any], tmp_path: Path):
    """Rows of different questions, one without an end; theirs makes token types where it is given none."""
    inputs = texts(23, (11, 11, 11))
    ids = inputs["input_ids"]
    ids[ids == 5] = 7
    ids[0, 3] = ids[0, 10] = ids[1, 5] = 5
    question = torch.tensor([4, 6, 1])[:, None] > torch.arange(11)
    inputs["token_type_ids"] = (~question).long()
    theirs = model_of("ForQuestionAnswering", sep_token_id=5, **options)
    spans = torch.tensor([[4, 6], [0, 9], [9, 10]])
    names = {"start_positions": spans[:, 0], "end_positions": spans[:, 1]}
    ours = verify(
        theirs,
        inputs,
        tmp_path,
        labels={"labels": spans},
        their_labels=names,
        only_theirs={"position_ids": counted(inputs["attention_mask"])},
    )
    logits = ours(**inputs).logits
    assert (logits[0, 1:4] < -1e5).all()
    assert (logits[0, [0, 4, 5]] > -1e5).all()
    wrapped = hub.wrap(ours)
    actual, expected = wrapped(ids, **names), theirs.float()(ids, **names)
    same(actual.start_logits[2], expected.start_logits[2], 1e-4)
    same(actual.loss, expected.loss, 1e-4)


def test_parameters_of_the_published_size():
    """google/bigbird-roberta-base: 128M with its pooler."""
    config = transformers.BigBirdConfig()
    with torch.device("meta"):
        theirs = transformers.BigBirdForPreTraining(config)
        ours = Transformer(FAMILIES["big_bird"].config(config.to_dict(), "ForPreTraining"))
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    assert sizes[0] == sizes[1]
    assert round(sizes[0] / 1e6) == 128
