"""BART with every head, loaded from transformers' files and saved back; caches and writing."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from encoder_decoders import GOALS, WRITTEN, loaded, same_texts, verify_refusal, verify_steps  # noqa: E402
from families import same, shaken, texts, verify  # noqa: E402

import polyformer  # noqa: E402
from polyformer.generation import GenerationConfig  # noqa: E402
from polyformer.generation.config import SpecialIds  # noqa: E402
from polyformer.generation.hub import from_hub  # noqa: E402
from polyformer.model import Transformer  # noqa: E402
from polyformer.presets import model_config  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "d_model": 12,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 14,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 19,
}
CONFIGS: list[dict[str, Any]] = [
    {"encoder_layerdrop": 0.2, "activation_dropout": 0.1, "attention_dropout": 0.2},
    {"tie_word_embeddings": False, "scale_embedding": True, "activation_function": "gelu_new"},
    {
        "scale_embedding": True,
        "pad_token_id": 0,
        "eos_token_id": 5,
        "decoder_start_token_id": 7,
        "activation_function": "relu",
        "decoder_layers": 3,
        "decoder_layerdrop": 0.1,
    },
]
NEXT = torch.randint(3, 29, (3, 11), generator=torch.Generator().manual_seed(3))
HEADS: dict[str, Any] = {
    "BartForConditionalGeneration": ({}, GOALS),
    "BartModel": ({}, None),
    "BartForSequenceClassification": ({"num_labels": 4}, torch.tensor([2, 0, 1])),
    "BartForQuestionAnswering": ({}, None),
    "BartForCausalLM": ({}, NEXT),
}
WRITERS = ("BartForConditionalGeneration", "BartModel")


def made(head: str = "BartForConditionalGeneration", config: int = 0, **options: Any) -> Any:
    """With a bias of the output that is not zero, where there is one."""
    torch.manual_seed(0)
    model = getattr(transformers, head)(transformers.BartConfig(**{**SIZES, **CONFIGS[config], **options}))
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    return model


def source(config: Any, side: str = "right") -> dict[str, Tensor]:
    """Texts that end in one end token each, the same with padding on either side."""
    inputs = texts(29, pad=config.pad_token_id, side="right")
    ids, mask = (
        inputs["input_ids"].masked_fill(inputs["input_ids"] == config.eos_token_id, 6),
        inputs["attention_mask"],
    )
    ids = ids.scatter(1, mask.sum(1, keepdim=True) - 1, config.eos_token_id)
    if side == "left":
        shifts = [11 - int(length) for length in mask.sum(1)]
        ids = torch.stack([row.roll(by) for row, by in zip(ids, shifts)])
        mask = mask.flip(1)
    return {"input_ids": ids, "attention_mask": mask}


def dead(theirs: Any, head: str) -> tuple[str, ...]:
    """What transformers makes and never computes."""
    if head == "BartForCausalLM":
        return tuple(name for name, _ in theirs.named_parameters() if "encoder_attn" in name)
    tied = theirs.config.tie_word_embeddings
    return () if tied else ("shared.weight", "model.shared.weight")


@pytest.mark.parametrize("config", range(len(CONFIGS)))
@pytest.mark.parametrize("head", HEADS)
def test_bart(head: str, config: int, tmp_path: Path):
    options, goals = HEADS[head]
    theirs = made(head, config, **options)
    inputs = source(theirs.config)
    shown = inputs["attention_mask"]
    if head in WRITERS:
        shown = (torch.arange(6) < torch.tensor([[6], [4], [2]])).long()
        inputs |= {"decoder_input_ids": WRITTEN, "decoder_attention_mask": shown}
    labels = wanted = None
    if goals is not None:
        labels = wanted = {"labels": goals if goals.dim() == 1 else goals.masked_fill(shown == 0, -100)}
    if head == "BartForCausalLM":  # theirs does not shift them
        assert labels is not None
        later = torch.cat([labels["labels"][:, 1:], torch.full((3, 1), -100)], 1)
        wanted = {"labels": later}
    verify(theirs, inputs, tmp_path, labels=labels, their_labels=wanted, mask=shown, dead=dead(theirs, head))


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_labels_are_shifted_as_theirs(config: int, tmp_path: Path):
    theirs: Any = shaken(made(config=config))
    ours = loaded(theirs, tmp_path)
    inputs = source(theirs.config)
    labels = torch.tensor(
        [[5, 7, -100, 28, 9, 1], [8, -100, -100, 3, 1, -100], [9, 1, -100, -100, -100, -100]]
    )
    mine, other = ours(**inputs, labels=labels), theirs(**inputs, labels=labels)
    same(mine.logits, other.logits)
    same(mine.loss, other.loss)


def test_answers_are_scored_as_theirs(tmp_path: Path):
    theirs: Any = shaken(made("BartForQuestionAnswering"))
    ours = loaded(theirs, tmp_path)
    ids, where = torch.randint(3, 29, (3, 7)), torch.tensor([[0, 3], [6, 6], [2, 5]])
    other = theirs(input_ids=ids, start_positions=where[:, 0], end_positions=where[:, 1])
    same(ours(ids, labels=where).loss, other.loss)


@pytest.mark.parametrize("head", ["BartForConditionalGeneration", "BartForSequenceClassification"])
def test_padding_on_the_left_changes_nothing(head: str, tmp_path: Path):
    """Against theirs with padding on the right: theirs counts positions from the padding on the left."""
    theirs: Any = shaken(made(head))
    ours = loaded(theirs, tmp_path)
    decoder_inputs = {"decoder_input_ids": WRITTEN} if head in WRITERS else {}
    same(
        ours(**source(theirs.config, "left"), **decoder_inputs).logits,
        theirs(**source(theirs.config), **decoder_inputs).logits,
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_steps_with_a_cache_are_one_pass(side: str, tmp_path: Path):
    theirs: Any = shaken(made(config=2))
    ours = loaded(theirs, tmp_path)
    verify_steps(ours, source(theirs.config, side), theirs, source(theirs.config))


@pytest.mark.parametrize(("config", "beams"), [(0, 1), (1, 1), (1, 4)])
def test_it_writes_what_theirs_writes(config: int, beams: int, tmp_path: Path):
    theirs: Any = shaken(made(config=config, forced_eos_token_id=None), 0.5)
    ours = loaded(theirs, tmp_path)
    inputs = source(theirs.config)
    expected = theirs.generate(**inputs, max_new_tokens=12, num_beams=beams, do_sample=False)
    settings = from_hub({"max_new_tokens": 12, "num_beams": beams})
    for side in ("left", "right"):
        padded = source(theirs.config, side)
        actual = ours.generate(padded["input_ids"], padded["attention_mask"], settings)
        same_texts(actual.sequences, expected, theirs.config.eos_token_id)


def test_the_decoder_alone_continues_as_theirs(tmp_path: Path):
    """Out of a checkpoint of both stacks, in which transformers does not find the decoder's token table."""
    whole: Any = shaken(made(forced_eos_token_id=None), 0.5)
    whole.save_pretrained(tmp_path)
    theirs = transformers.BartForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        theirs.get_input_embeddings().weight.copy_(whole.get_input_embeddings().weight)
    ours = polyformer.from_pretrained(tmp_path, head="BartForCausalLM")
    assert ours.config.encoder is None
    ids = torch.randint(6, 29, (2, 5))
    same(ours(ids).logits, theirs(input_ids=ids).logits)
    expected = theirs.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    actual = ours.generate(ids, config=GenerationConfig(max_new_tokens=8, special=SpecialIds(eos=())))
    assert actual.sequences.tolist() == expected.tolist()


def test_chances_stand_where_theirs_do(tmp_path: Path):
    ours = loaded(made(dropout=0.3, decoder_layerdrop=0.4), tmp_path)
    for stack, layerdrop in ((ours.config.encoder, 0.2), (ours.config.decoder, 0.4)):
        assert stack is not None
        data = stack.to_dict()
        assert (data["dropout"], data["layerdrop"], data["final_dropout"]) == (0.3, layerdrop, 0.0)
        assert data["feedforward"]["inner_dropout"] == 0.1
        assert data["attention"]["mechanism"]["dropout"] == 0.2


@pytest.mark.parametrize(("name", "count"), [("bart-base", 139420416), ("bart-large", 406291456)])
def test_parameter_counts(name: str, count: int):
    """Of the released checkpoints."""
    with torch.device("meta"):
        ours = Transformer(model_config(name))
        hub, _ = polyformer.checkpoints.FAMILIES["bart"].hub_config(ours.config)
        theirs = transformers.BartForConditionalGeneration(transformers.BartConfig(**hub))
    assert sum(parameter.numel() for parameter in ours.parameters()) == count
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize_before": True}, "config.json: normalize_before is True, and only False is supported"),
        ({"add_final_layer_norm": True}, "config.json: add_final_layer_norm is True"),
        ({"activation_function": "mish"}, "unknown activation_function 'mish'"),
        ({"architectures": ["BartForMaskedLM"]}, "unknown architecture of 'bart' 'BartForMaskedLM'"),
    ],
)
def test_what_is_not_computed_is_refused(options: dict[str, Any], message: str, tmp_path: Path):
    verify_refusal(made(), tmp_path, options, message)
