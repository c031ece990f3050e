"""M2M-100, loaded from transformers' files and saved back; positions, caches, translation into a language."""

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
from transformers.models.m2m_100 import modeling_m2m_100  # noqa: E402

import polyformer  # noqa: E402
from polyformer.generation.hub import from_hub  # noqa: E402
from polyformer.model import Transformer  # noqa: E402
from polyformer.position import Shape, SinusoidalConfig  # noqa: E402
from polyformer.presets import model_config  # noqa: E402

Positions = modeling_m2m_100.M2M100SinusoidalPositionalEmbedding
THEIR_TABLE = Positions.get_embedding

SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "d_model": 12,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 14,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 9,
}
CONFIGS: list[dict[str, Any]] = [
    {"attention_dropout": 0.2},
    {"tie_word_embeddings": False, "scale_embedding": False, "activation_function": "gelu"},
    {
        "pad_token_id": 0,
        "eos_token_id": 5,
        "decoder_start_token_id": 7,
        "encoder_layers": 2,
        "d_model": 6,
        "encoder_layerdrop": 0.0,
    },
]


@pytest.fixture(autouse=True)
def exact_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their table is made in float32; here by the same equation in float64, which `double` then keeps."""

    def table(count: int, width: int, padding: int) -> Tensor:
        half = width // 2
        angles = torch.arange(count).double()[:, None] / 10000 ** (torch.arange(half).double() / (half - 1))
        waves = torch.cat([angles.sin(), angles.cos(), torch.zeros(count, width % 2).double()], 1)
        waves[padding] = 0
        return waves

    monkeypatch.setattr(Positions, "get_embedding", staticmethod(table))


def made(head: str = "M2M100ForConditionalGeneration", config: int = 0, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, head)(transformers.M2M100Config(**{**SIZES, **CONFIGS[config], **options}))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", range(len(CONFIGS)))
@pytest.mark.parametrize("head", ["M2M100ForConditionalGeneration", "M2M100Model"])
def test_m2m100(head: str, config: int, side: str, tmp_path: Path):
    """Texts longer than max_position_embeddings too: the table grows."""
    theirs = made(head, config)
    pad = theirs.config.pad_token_id
    inputs = texts(29, pad=pad, side=side)
    shown = (torch.arange(6) < torch.tensor([[6], [4], [2]])).long().flip(1 if side == "left" else 0)
    inputs |= {
        "decoder_input_ids": WRITTEN.masked_fill(shown == 0, pad),
        "decoder_attention_mask": shown,
    }
    labels = None if head == "M2M100Model" else {"labels": GOALS.masked_fill(shown == 0, -100)}
    tied = theirs.config.tie_word_embeddings
    dead = () if tied else ("shared.weight", "model.shared.weight")
    verify(theirs, inputs, tmp_path, labels=labels, dead=dead)


def test_labels_are_shifted_as_theirs(tmp_path: Path):
    theirs: Any = shaken(made())
    ours = loaded(theirs, tmp_path)
    inputs = texts(29, pad=1, side="left")
    labels = torch.tensor([[5, 7, 3, 28, 9, 2], [8, 4, 4, 3, 2, -100], [9, 2, -100, -100, -100, -100]])
    mine, other = ours(**inputs, labels=labels), theirs(**inputs, labels=labels)
    same(mine.logits[labels != -100], other.logits[labels != -100])
    same(mine.loss, other.loss)


@pytest.mark.parametrize("width", [8, 9])
def test_positions_are_theirs_as_released(width: int):
    """As far as float32 holds their angles."""
    config = SinusoidalConfig(layout="halves", inclusive=True, offset=2)
    x, pos = torch.zeros(1, 1000, width), torch.arange(1000)
    actual = config.build(Shape(hidden_size=width)).embed(x, pos, 0)[0]
    torch.testing.assert_close(actual, THEIR_TABLE(1002, width, 1)[2:], rtol=0, atol=2e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_steps_with_a_cache_are_one_pass(side: str, tmp_path: Path):
    theirs: Any = shaken(made())
    ours = loaded(theirs, tmp_path)
    inputs = texts(29, pad=1, side=side)
    verify_steps(ours, inputs, theirs, inputs)


@pytest.mark.parametrize(("config", "beams"), [(0, 1), (1, 1), (2, 1), (0, 5)])
def test_it_translates_into_the_forced_language(config: int, beams: int, tmp_path: Path):
    theirs: Any = shaken(made(config=config), 0.5)
    ours = loaded(theirs, tmp_path)
    inputs = texts(29, pad=theirs.config.pad_token_id, side="left")
    options = {"max_new_tokens": 12, "num_beams": beams, "forced_bos_token_id": 11}
    expected = theirs.generate(**inputs, **options, do_sample=False)
    actual = ours.generate(inputs["input_ids"], inputs["attention_mask"], from_hub(options))
    assert (actual.sequences[:, 0] == 11).all()
    same_texts(actual.sequences, expected, theirs.config.eos_token_id)


@pytest.mark.parametrize(("name", "count"), [("m2m100-418m", 483905536), ("m2m100-1.2b", 1239470080)])
def test_parameter_counts(name: str, count: int):
    """Of the released checkpoints."""
    with torch.device("meta"):
        ours = Transformer(model_config(name))
        hub, _ = polyformer.checkpoints.FAMILIES["m2m_100"].hub_config(ours.config)
        theirs = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**hub))
    assert sum(parameter.numel() for parameter in ours.parameters()) == count
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_function": "mish"}, "unknown activation_function 'mish'"),
        ({"architectures": ["M2M100ForCausalLM"]}, "unknown architecture of 'm2m_100' 'M2M100ForCausalLM'"),
    ],
)
def test_what_is_not_computed_is_refused(options: dict[str, Any], message: str, tmp_path: Path):
    verify_refusal(made(), tmp_path, options, message)
