"""What one family of encoder-decoders has that others do not: files, positions, padding and float16."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import PATCHES, RELEASED_TABLE
from families import at_real, loaded, predictions, same, shaken, texts
from family_inputs import DECODED, ended
from family_table import TABLE, their_model
from torch import Tensor

import polyformer
from polyformer.attention.positions import Shape, SinusoidalConfig
from polyformer.core.files import write_tensors
from polyformer.models.architectures.weights import with_weights

WRITER = "ForConditionalGeneration"


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    PATCHES["t5"](monkeypatch)


def t5(config: int = 0, **options: Any) -> Any:
    return their_model("t5", WRITER, **TABLE["t5"].configs[config], **options)


def sources(theirs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same texts with padding on the left and on the right."""
    right = texts(29, pad=theirs.config.pad_token_id)
    right["input_ids"] = ended(right["input_ids"], right["attention_mask"], theirs.config.eos_token_id)
    shifts = [11 - int(length) for length in right["attention_mask"].sum(1)]
    left = {name: torch.stack([row.roll(by) for row, by in zip(x, shifts)]) for name, x in right.items()}
    return left, right


@pytest.mark.parametrize("task", [WRITER, "ForSequenceClassification", "ForQuestionAnswering"])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_padding_on_the_left_changes_nothing(name: str, task: str, tmp_path: Path):
    """Against theirs with padding on the right: on the left BART's counts positions from the padding, and
    decoders of both that read the source read padding as text."""
    theirs: Any = shaken(their_model(name, task))
    ours, (left, right) = loaded(theirs, tmp_path), sources(theirs)
    decoder_inputs = {"decoder_input_ids": DECODED} if task == WRITER else {}
    (expected,) = predictions(theirs(**right, **decoder_inputs))
    actual = ours(**left, **decoder_inputs).logits
    same(at_real(actual, left["attention_mask"]), at_real(expected, right["attention_mask"]))


def test_chances_of_bart_stand_where_theirs_do(tmp_path: Path):
    options = {"dropout": 0.3, "encoder_layerdrop": 0.2, "decoder_layerdrop": 0.4}
    theirs = their_model("bart", WRITER, **options, activation_dropout=0.1, attention_dropout=0.2)
    ours = loaded(theirs, tmp_path)
    for stack, layerdrop in ((ours.config.encoder, 0.2), (ours.config.decoder, 0.4)):
        data = stack.to_dict()
        assert (data["dropout"], data["layerdrop"], data["final_dropout"]) == (0.3, layerdrop, 0.0)
        assert data["feedforward"]["inner_dropout"] == 0.1
        assert data["attention"]["mechanism"]["dropout"] == 0.2


@pytest.mark.parametrize("width", [8, 9])
def test_positions_of_m2m_100_are_theirs_as_released(width: int):
    """As far as float32 holds their angles."""
    config = SinusoidalConfig(layout="halves", inclusive=True, offset=2)
    x, pos = torch.zeros(1, 1000, width), torch.arange(1000)
    actual = config.build(Shape(hidden_size=width)).embed(x, pos, 0)[0]
    torch.testing.assert_close(actual, RELEASED_TABLE(1002, width, 1)[2:], rtol=0, atol=2e-4)


def test_an_output_layer_of_its_own_is_found_in_the_files(tmp_path: Path):
    """Version 1.1 says so in its configuration; transformers 5 saves it as tied, and believes its files."""
    theirs: Any = shaken(t5(config=1))
    tensors = {name: tensor for name, tensor in theirs.state_dict().items() if "embed_tokens" not in name}
    tensors["lm_head.weight"] = torch.randn(29, 12, dtype=torch.float64)
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    newer = "scale_decoder_outputs", "dense_act_fn"
    old = {name: value for name, value in saved.items() if name not in newer}
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


def test_the_oldest_files_of_t5_are_read(tmp_path: Path):
    """With their name of the class, one stack's table of tokens for the shared one, and a bias never read."""
    theirs: Any = shaken(t5())
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for name in ("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "tie_word_embeddings"):
        del saved[name]
    old = {**saved, "architectures": ["T5WithLMHeadModel"], "n_positions": 512, "output_past": True}
    (tmp_path / "config.json").write_text(json.dumps(old))
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    named = theirs.state_dict().items()
    tensors = {name: tensor.clone() for name, tensor in named if name != "shared.weight"}
    write_tensors(tmp_path / "model.safetensors", {**tensors, unread: torch.zeros(8, 3)})
    ids = torch.randint(3, 29, (2, 7))
    ours = polyformer.from_pretrained(tmp_path)
    same(ours(ids, decoder_input_ids=ids).logits, theirs(input_ids=ids, decoder_input_ids=ids).logits)


def test_dropout_stands_in_all_places_of_t5(tmp_path: Path):
    """The embedding sum, sub-layers, attention weights, inside the feed-forward, after the final norm."""
    ours = loaded(t5(dropout_rate=0.25), tmp_path)
    for stack in (ours.config.encoder, ours.config.decoder):
        data = stack.to_dict()
        assert (data["dropout"], data["final_dropout"]) == (0.25, 0.25)
        assert data["feedforward"]["inner_dropout"] == 0.25
        assert data["attention"]["mechanism"]["dropout"] == 0.25


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("config", [0, 1])
def test_float16_computes_what_exceeds_its_range(config: int, autocast: bool, tmp_path: Path):
    """As in the largest T5, feed-forwards write what float16 has no number for, and norms divide by it."""
    theirs: Any = shaken(t5(config=config))
    ours, (_, inputs), ids = loaded(theirs, tmp_path), sources(theirs), torch.randint(3, 29, (3, 5))
    batch = {**inputs, "decoder_input_ids": ids, "labels": ids, "output_hidden_states": True}
    for factor in (1.0, 20000.0):
        for name, tensor in ours.named_parameters():
            if name.endswith("feedforward.down.weight"):
                tensor *= factor / tensor.abs().amax()
        exact = copy.deepcopy(ours).double()(**batch)
        rounded = copy.deepcopy(ours).to(torch.float32 if autocast else torch.float16)
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            output = rounded(**batch)
        apart = (output.logits.double() - exact.logits).norm() / exact.logits.norm()
        assert apart < 0.01
        assert output.loss.isfinite()
        assert autocast or output.logits.dtype == torch.float16
    assert max(tensor.abs().max() for tensor in output.hidden_states) > torch.finfo(torch.float16).max


@torch.no_grad()
def test_float16_stays_finite_in_int8(tmp_path: Path):
    """Integers have no such last product: larger values become the largest of float16."""
    ours, ids = loaded(shaken(t5()), tmp_path), torch.randint(3, 29, (3, 5))
    for name, tensor in ours.named_parameters():
        if name.endswith("feedforward.down.weight"):
            tensor *= 20000 / tensor.abs().amax()
    rounded = with_weights(ours.float(), "int8").half()
    assert rounded(ids, decoder_input_ids=ids).logits.isfinite().all()
