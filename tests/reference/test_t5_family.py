"""T5 1.0 and 1.1 with every head, loaded from transformers' files and saved back; writing; float16."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from encoder_decoders import GOALS, loaded, same_texts, verify_refusal, verify_steps  # noqa: E402
from families import same, shaken, texts, verify  # noqa: E402
from transformers.models.t5 import modeling_t5  # noqa: E402

import polyformer  # noqa: E402
from polyformer.core.files import write_tensors  # noqa: E402
from polyformer.generation.hub import from_hub  # noqa: E402
from polyformer.model import Transformer  # noqa: E402
from polyformer.presets import model_config  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "d_model": 12,
    "d_kv": 5,
    "d_ff": 20,
    "num_layers": 2,
    "num_heads": 3,
    "decoder_start_token_id": 0,
}
CONFIGS: list[dict[str, Any]] = [
    {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 9, "num_decoder_layers": 3},
    {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-5},
    {"feed_forward_proj": "gated-silu", "d_kv": 4, "pad_token_id": 2, "decoder_start_token_id": 4, "d_ff": 7},
]
TAGS = torch.full((3, 11), -100)
TAGS[0, 3], TAGS[1, 2], TAGS[2, 9] = 1, 3, 0
WRITTEN = torch.tensor([[4, 7, 12, 5, 28, 9], [3, 3, 21, 8, 5, 6], [28, 7, 19, 4, 9, 1]])
HEADS: dict[str, Any] = {
    "T5ForConditionalGeneration": ({}, {"labels": GOALS}),
    "T5Model": ({}, None),
    "T5EncoderModel": ({}, None),
    "T5ForSequenceClassification": ({"num_labels": 3}, {"labels": torch.tensor([2, 0, 1])}),
    "T5ForTokenClassification": ({"num_labels": 4}, {"labels": TAGS}),
    "T5ForQuestionAnswering": ({}, None),
}
WRITERS = ("T5ForConditionalGeneration", "T5Model")
SHIFTED = ("T5ForSequenceClassification", "T5ForQuestionAnswering")
"""Heads whose decoder reads the source: transformers' reads padding on the left as text."""


@pytest.fixture(autouse=True)
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their norm takes its variance in float32, whatever the model is in: here in float64 where that is."""

    def forward(self: Any, x: Tensor) -> Tensor:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        normed = x * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(self.weight.dtype)

    monkeypatch.setattr(modeling_t5.T5LayerNorm, "forward", forward)


def made(head: str = "T5ForConditionalGeneration", config: int = 0, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, head)(transformers.T5Config(**{**SIZES, **CONFIGS[config], **options}))


def source(config: Any, side: str) -> dict[str, Tensor]:
    """Texts that end in one end token each."""
    inputs = texts(29, pad=config.pad_token_id, side=side)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    last = torch.where(mask.bool(), torch.arange(11), -1).amax(1)
    return {**inputs, "input_ids": ids.scatter(1, last[:, None], config.eos_token_id)}


@pytest.mark.parametrize("config", range(len(CONFIGS)))
@pytest.mark.parametrize(
    ("head", "side"),
    [*((item, "right") for item in HEADS), *((item, "left") for item in HEADS if item not in SHIFTED)],
)
def test_t5(head: str, config: int, side: str, tmp_path: Path):
    options, labels = HEADS[head]
    theirs = made(head, config, **options)
    inputs = source(theirs.config, side)
    shown = inputs["attention_mask"]
    if head in WRITERS:
        shown = (torch.arange(6) < torch.tensor([[6], [4], [2]])).long().flip(1 if side == "left" else 0)
        inputs |= {"decoder_input_ids": WRITTEN, "decoder_attention_mask": shown}
    if labels is not None and labels["labels"].dim() == 2:
        labels = {"labels": labels["labels"].masked_fill(shown == 0, -100)}
    verify(theirs, inputs, tmp_path, labels=labels, mask=shown)


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_labels_are_shifted_as_theirs(config: int, tmp_path: Path):
    """What follows is predicted from the start token and labels, with padding where there is none (-100)."""
    theirs: Any = shaken(made(config=config))
    ours = loaded(theirs, tmp_path)
    inputs = source(theirs.config, "left")
    labels = torch.tensor(
        [[5, 7, -100, 28, 9, 1], [8, -100, -100, 3, 1, -100], [9, 1, -100, -100, -100, -100]]
    )
    mine, other = ours(**inputs, labels=labels), theirs(**inputs, labels=labels)
    same(mine.logits, other.logits)
    same(mine.loss, other.loss)


def test_answers_are_scored_as_theirs(tmp_path: Path):
    theirs: Any = shaken(made("T5ForQuestionAnswering"))
    ours = loaded(theirs, tmp_path)
    ids, where = torch.randint(3, 29, (3, 7)), torch.tensor([[0, 3], [6, 6], [2, 5]])
    other = theirs(input_ids=ids, start_positions=where[:, 0], end_positions=where[:, 1])
    same(ours(ids, labels=where).loss, other.loss)


def test_a_source_padded_on_the_left_is_classified_as_on_the_right(tmp_path: Path):
    """transformers' decoder reads padding on the left as text; ours, as everywhere, changes nothing by it."""
    theirs = made("T5ForSequenceClassification", num_labels=3)
    ours = loaded(shaken(theirs), tmp_path)
    right, left = source(theirs.config, "right"), source(theirs.config, "left")
    left["input_ids"][left["attention_mask"] == 1] = right["input_ids"][right["attention_mask"] == 1]
    same(ours(**left).logits, ours(**right).logits)


def test_an_output_layer_of_its_own_is_found_in_the_files(tmp_path: Path):
    """Version 1.1 says so in its configuration; transformers 5 saves it as tied, and believes its files."""
    theirs: Any = shaken(made(config=1))
    tensors = dict(theirs.state_dict())
    tensors["lm_head.weight"] = torch.randn(29, 12, dtype=torch.float64)
    tensors = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    old = {
        name: tensor
        for name, tensor in saved.items()
        if name not in ("scale_decoder_outputs", "dense_act_fn")
    }
    ids = torch.randint(3, 29, (2, 7))
    for config in (saved, {**old, "tie_word_embeddings": False}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        write_tensors(tmp_path / "model.safetensors", tensors)
        ours = polyformer.from_pretrained(tmp_path)
        assert not ours.config.embedding.tied
        assert not ours.config.head.to_dict()["scaled"]
        again = type(theirs).from_pretrained(tmp_path, dtype=torch.float64)
        same(ours(ids, decoder_input_ids=ids).logits, again(input_ids=ids, decoder_input_ids=ids).logits)
        ours.save_pretrained(tmp_path / "back", format="hub")
        back = type(theirs).from_pretrained(tmp_path / "back", dtype=torch.float64)
        assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in tensors.items())
        assert not back.config.scale_decoder_outputs


def test_the_oldest_files_are_read(tmp_path: Path):
    """With their name of the class, one stack's table of tokens for the shared one, and a bias never read."""
    theirs: Any = shaken(made())
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for name in ("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "tie_word_embeddings"):
        del saved[name]
    old = {**saved, "architectures": ["T5WithLMHeadModel"], "n_positions": 512, "output_past": True}
    (tmp_path / "config.json").write_text(json.dumps(old))
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors = {
        name: tensor.clone() for name, tensor in theirs.state_dict().items() if name != "shared.weight"
    }
    write_tensors(tmp_path / "model.safetensors", {**tensors, unread: torch.zeros(8, 3)})
    ids = torch.randint(3, 29, (2, 7))
    ours = polyformer.from_pretrained(tmp_path)
    same(ours(ids, decoder_input_ids=ids).logits, theirs(input_ids=ids, decoder_input_ids=ids).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_steps_with_a_cache_are_one_pass(side: str, tmp_path: Path):
    theirs: Any = shaken(made())
    ours = loaded(theirs, tmp_path)
    inputs = source(theirs.config, side)
    verify_steps(ours, inputs, theirs, inputs)


@pytest.mark.parametrize(("config", "beams"), [(0, 1), (1, 1), (2, 1), (0, 4)])
def test_it_writes_what_theirs_writes(config: int, beams: int, tmp_path: Path):
    theirs: Any = shaken(made(config=config, num_decoder_layers=2), 0.5)  # their cache cannot have more
    ours = loaded(theirs, tmp_path)
    inputs = source(theirs.config, "left")
    expected = theirs.generate(**inputs, max_new_tokens=12, num_beams=beams, do_sample=False)
    settings = from_hub({"max_new_tokens": 12, "num_beams": beams})
    actual = ours.generate(inputs["input_ids"], inputs["attention_mask"], settings)
    same_texts(actual.sequences, expected, 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_attention_weights_are_theirs(side: str, tmp_path: Path):
    theirs: Any = shaken(made())
    theirs.set_attn_implementation("eager")
    ours = loaded(theirs, tmp_path)
    inputs = {**source(theirs.config, side), "decoder_input_ids": WRITTEN}
    mine, other = ours(**inputs, output_attentions=True), theirs(**inputs, output_attentions=True)
    real = inputs["attention_mask"].bool()
    for name in ("decoder_attentions", "cross_attentions", "encoder_attentions"):
        own = mine.attentions if name == "decoder_attentions" else getattr(mine, name)
        for a, b in zip(own, getattr(other, name), strict=True):
            rows = real if name == "encoder_attentions" else torch.ones(3, 6, dtype=torch.bool)
            same(a.transpose(1, 2)[rows], b.transpose(1, 2)[rows])


def test_dropout_stands_in_all_places(tmp_path: Path):
    """The embedding sum, sub-layers, attention weights, inside the feed-forward, after the final norm."""
    ours = loaded(made(dropout_rate=0.25), tmp_path)
    for stack in (ours.config.encoder, ours.config.decoder):
        assert stack is not None
        data = stack.to_dict()
        actual = (
            data["dropout"],
            data["final_dropout"],
            data["feedforward"]["inner_dropout"],
            data["attention"]["mechanism"]["dropout"],
        )
        assert actual == (0.25,) * 4


@pytest.mark.parametrize("config", [0, 1])
def test_float16_stays_finite_where_it_overflows(config: int, tmp_path: Path):
    """As in the largest T5, feed-forwards write what float16 has no number for."""
    theirs: Any = shaken(made(config=config))
    ours = loaded(theirs, tmp_path)
    inputs, ids = source(theirs.config, "right"), torch.randint(3, 29, (3, 5))
    with torch.no_grad():
        calm = ours.half()(**inputs, decoder_input_ids=ids).logits
        torch.testing.assert_close(
            calm.double(), theirs(**inputs, decoder_input_ids=ids).logits, rtol=0.05, atol=0.05
        )
        for name, tensor in ours.named_parameters():
            if name.endswith("feedforward.down.weight"):
                tensor *= 20000 / tensor.abs().amax()
        output = ours(**inputs, decoder_input_ids=ids, labels=ids, output_hidden_states=True)
    assert output.loss.isfinite()
    assert max(tensor.abs().max() for tensor in output.hidden_states) == torch.finfo(torch.float16).max
    for tensor in (output.logits, *output.hidden_states, *output.encoder_hidden_states):
        assert tensor.isfinite().all()


@pytest.mark.parametrize(
    ("name", "count"),
    [("t5-small", 60506624), ("t5-base", 222903552), ("t5-large", 737668096), ("t5-v1_1-base", 247577856)],
)
def test_parameter_counts(name: str, count: int):
    """Of the released checkpoints; transformers 5 makes version 1.1 with a tied output layer."""
    config = model_config(name)
    with torch.device("meta"):
        ours = Transformer(config)
        family = polyformer.checkpoints.FAMILIES["t5"]
        theirs = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**family.hub_config(config)[0])
        )
    own = 0 if config.embedding.tied else 32128 * 768
    assert sum(parameter.numel() for parameter in ours.parameters()) == count
    assert sum(parameter.numel() for parameter in theirs.parameters()) + own == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_decoder": True}, "config.json: is_decoder is True, and only False is supported"),
        ({"feed_forward_proj": "gated-mish"}, "unknown feed_forward_proj 'gated-mish'"),
        ({"architectures": ["T5ForMaskedLM"]}, "unknown architecture of 't5' 'T5ForMaskedLM'"),
    ],
)
def test_what_is_not_computed_is_refused(options: dict[str, Any], message: str, tmp_path: Path):
    verify_refusal(made(), tmp_path, options, message, "dense_act_fn")
