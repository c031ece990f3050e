"""RoPE extensions that depend on the length of a text, in whole models: by row, and in any chunks."""

import pytest
import torch
from torch import Tensor

from polyformer import create_model
from polyformer.attention.positions import RopeConfig, Shape, Site
from polyformer.attention.positions.rope_extensions import (
    DynamicNtkConfig,
    LengthExtensionConfig,
    LongRopeConfig,
    SelfExtendConfig,
)
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints.convert import convert

TRAINED = 12
SHORT, LONG = tuple(1.0 + m / 10 for m in range(4)), (1.0, 2.0, 5.0, 11.0)
EXTENSIONS: list[LengthExtensionConfig] = [
    DynamicNtkConfig(factor=2.0, original_max_positions=TRAINED),
    LongRopeConfig(factor=4.0, original_max_positions=TRAINED, short_factor=SHORT, long_factor=LONG),
    SelfExtendConfig(factor=3, original_max_positions=TRAINED, window=5),
]
SIZES = {"vocab_size": 31, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}


def model(extension: LengthExtensionConfig | None, **options: object) -> Transformer:
    torch.manual_seed(0)
    built = create_model(
        "decoder-tiny", **SIZES, **options, position=RopeConfig(base=50.0, extension=extension)
    )
    return built.double().eval()


@pytest.fixture(params=EXTENSIONS, ids=lambda extension: extension.kind)
def extension(request: pytest.FixtureRequest) -> LengthExtensionConfig:
    return request.param


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 31, (1, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_texts_up_to_the_length_of_training_are_unchanged(extension: LengthExtensionConfig, ids: Tensor):
    """Bitwise; and the first token beyond it is not."""
    plain = model(None) if extension.kind != "longrope" else None
    extended = model(extension)
    if plain is not None:
        assert torch.equal(plain(ids[:, :TRAINED]).logits, extended(ids[:, :TRAINED]).logits)
        longer = [each(ids[:, : TRAINED + 1]).logits for each in (plain, extended)]
        torch.testing.assert_close(longer[0][:, :TRAINED], longer[1][:, :TRAINED], rtol=1e-10, atol=1e-10)
        assert not torch.allclose(longer[0][:, TRAINED], longer[1][:, TRAINED])
    whole, start = extended(ids).logits, extended(ids[:, :TRAINED]).logits
    torch.testing.assert_close(whole[:, :TRAINED], start, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_row_does_not_depend_on_its_neighbours(extension: LengthExtensionConfig, ids: Tensor):
    """A short text with padding on the left, in a batch with a long text."""
    extended, short = model(extension), ids[:, 5:14]
    padded = torch.cat([torch.zeros(1, 31, dtype=torch.long), short], 1)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :31] = 0
    together = extended(torch.cat([ids, padded]), attention_mask=mask).logits
    torch.testing.assert_close(together[:1], extended(ids).logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(together[1:, 31:], extended(short).logits, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_chunks_and_single_tokens_equal_one_pass(extension: LengthExtensionConfig, ids: Tensor):
    """Also if the text leaves the trained length in the middle of a chunk."""
    extended = model(extension, attention="Window(9, 0) | Global(2)")
    whole, state, start = extended(ids).logits, None, 0
    for new in (7, 10, 1, 1, 21):
        output = extended(ids[:, start : start + new], state=state, use_cache=True)
        expected = whole[:, start : start + new]
        torch.testing.assert_close(output.logits, expected, rtol=1e-10, atol=1e-10)
        state, start = output.state, start + new


@torch.no_grad()
def test_generation_equals_whole_passes(extension: LengthExtensionConfig, ids: Tensor):
    """Greedy, and with drafts that are taken back."""
    extended, text = model(extension), ids[:, :9]
    for _ in range(12):
        text = torch.cat([text, extended(text).logits[:, -1:].argmax(-1)], 1)
    for options in ({}, {"draft": "lookup"}):
        out = extended.generate(ids[:, :9], max_new_tokens=12, min_new_tokens=12, **options)
        assert out.new_tokens() == [text[0, 9:].tolist()]


@torch.no_grad()
def test_recorded_weights_sum_to_1(extension: LengthExtensionConfig, ids: Tensor):
    output = model(extension)(ids, output_attentions=True)
    assert len(output.attentions) == 2
    for weights in output.attentions:
        assert weights.shape == (1, 2, 40, 40)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 40, dtype=torch.float64))


def test_what_cannot_be_computed_is_refused(extension: LengthExtensionConfig, ids: Tensor):
    position = RopeConfig(extension=extension)
    with pytest.raises(InputError, match="cannot use rotary positions that depend on the length of the text"):
        create_model("decoder-tiny", **SIZES, position=position, attention="lsh")
    with pytest.raises(
        InputError, match=rf"'{extension.kind}' depends on .* not work in an encoder; use 'yarn'"
    ):
        create_model("encoder-tiny", **SIZES, position=position)(ids)


def test_numbers_that_do_not_fit_are_refused():
    x, context = torch.zeros(1, 1, 3, 16), Context(3, 3, causal=True)
    rope = RopeConfig(extension=EXTENSIONS[1]).build(Shape(hidden_size=16, head_size=16))
    with pytest.raises(InputError, match=r"expected 8 numbers, one for each pair .* got 4"):
        rope.rotate(x, x, context, Site(0, lambda x: x, lambda x: x))
    with pytest.raises(InputError, match=r"window: expected 1 to 63, less than the 64 positions .* got 64"):
        convert(model(None), max_positions=256, extension="self_extend(window=64)")


def test_conversion_chooses_the_factor():
    """Self-Extend needs a larger factor, because near tokens keep their positions."""
    converted, _ = convert(model(None), max_positions=256, extension="self_extend(window=16)")
    assert converted.config.decoder.position.extension == SelfExtendConfig(
        factor=5, original_max_positions=64, window=16
    )


def test_conversion_to_dynamic_has_the_factor_of_its_source():
    """The base follows the length of each text, not the greatest number of positions."""
    converted, _ = convert(model(None), max_positions=256, extension="dynamic")
    assert converted.config.decoder.position.extension == DynamicNtkConfig(
        factor=1.0, original_max_positions=64
    )
