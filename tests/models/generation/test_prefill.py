"""Prompts in chunks: the same texts, states and hidden states as in one pass."""

from typing import Any

import pytest
import torch
from tiny_models import SPECIAL, VOCAB, left_padded, prompts

from polyformer import create_model
from polyformer.models.architectures import Transformer
from polyformer.models.generation import prefill
from polyformer.models.generation.decoder import Decoder

LENGTH = 23


def windowed(attention: str = "Window(5) | Global(2)", **options: Any) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 12, "num_attention_heads": 2}
        options = {"initializer_range": 0.8, "position": "rope", "special": SPECIAL, **options}
        return create_model("decoder-tiny", attention=attention, **sizes, **options).double().eval()


def read(model: Transformer, ids: torch.Tensor, mask: torch.Tensor | None, chunk: int) -> tuple[Decoder, Any]:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(prefill, "CHUNK", chunk)
        decoder = Decoder(model, 4)
        return decoder, decoder.start(ids, mask, None, {})


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["Window(5) | Global(2)", "Window(3)", "Strided(4)"])
def test_chunks_change_nothing(attention: str, padded: bool) -> None:
    model = windowed(attention)
    ids, mask = prompts(2, LENGTH), None
    if padded:
        ids, mask = left_padded([prompts(1, LENGTH)[0], prompts(1, 11, seed=1)[0]])
    (whole, start), (parts, other) = (read(model, ids, mask, chunk) for chunk in (100, 4))
    torch.testing.assert_close(other.logits, start.logits)
    torch.testing.assert_close(_real(parts.hidden, mask), _real(whole.hidden, mask))
    assert other.state.model.tokens.length == LENGTH
    token = start.logits.argmax(-1)
    with torch.no_grad():
        following = [
            decoder.step(token, begun.state)[0] for decoder, begun in ((whole, start), (parts, other))
        ]
    torch.testing.assert_close(*following)


def _real(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return hidden if mask is None else hidden[mask != 0]


def test_a_mask_without_padding_is_left_out() -> None:
    ids = prompts(2, LENGTH)
    _, start = read(windowed(), ids, torch.ones_like(ids), 4)
    assert start.state.model.tokens.valid is None


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "Full()"},
        {"attention": "PerLayer([Window(3), Full()])"},
        {"attention": "PerHead([Window(3), Full()])"},
        {"attention": "performer"},
        {"memory": "recurrent", "position": "transformer_xl"},
    ],
    ids=str,
)
def test_other_models_read_a_prompt_at_once(options: dict[str, Any]) -> None:
    model, ids = windowed(**options), prompts(1, 4 * prefill.CHUNK)
    assert not prefill.reads_in_chunks(model.decoder, model.new_state(0), ids)


def test_short_prompts_are_read_at_once() -> None:
    model = windowed()
    assert not prefill.reads_in_chunks(model.decoder, model.new_state(0), prompts(1, prefill.CHUNK))
    assert prefill.reads_in_chunks(model.decoder, model.new_state(0), prompts(1, 2 * prefill.CHUNK))
