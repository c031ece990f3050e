"""What a model reads beside its ids, given to `generate`: every choice is that of the full forward pass."""

from typing import Any

import pytest
import torch
from tiny_models import BOS, SPECIAL, VOCAB, decoder, left_padded, prompts
from torch import Tensor

from polyformer import Causal, InputError, Marked, Window, create_model
from polyformer.attention.patterns.base import Pattern
from polyformer.models.architectures import Transformer

ROWS, LENGTH, NEW = 3, 7, 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "special": SPECIAL,
    "intermediate_size": 24,
    "tied": False,
    "initializer_range": 0.8,
}


class SameSegment(Pattern):
    """A query sees the tokens of its own segment; all, where there are no segments."""

    def allows(self, context: Any, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if context.q_segment is None:
            return (q_idx >= 0) & (kv_idx >= 0)
        return context.q_segment[b, q_idx] == context.kv_segment[b, kv_idx]


def built(preset: str, **options: Any) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = create_model(preset, **SIZES, **options).double().eval()
        for parameter in model.parameters():  # also those that begin as zeros
            parameter.data.add_(torch.randn_like(parameter))
    return model


def numbers(*shape: int, below: int = 2) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(8))


def halves() -> Tensor:
    return (torch.arange(LENGTH) >= 4).long().expand(ROWS, -1)


MARKS = torch.arange(LENGTH).lt(2).long().expand(ROWS, -1)
RELATIONS = numbers(ROWS, LENGTH, LENGTH, below=3)
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "types": ({"type_vocab_size": 2}, {"token_type_ids": halves()}),
    "languages": ({"num_languages": 3}, {"langs": numbers(ROWS, 1, below=3).expand(-1, LENGTH)}),
    "segments": ({"attention": SameSegment()}, {"segment_ids": halves()}),
    "marks": ({"attention": Window(1) | Marked()}, {"global_attention_mask": MARKS}),
    "relations": ({"position": "relation_labels(num_labels=3)"}, {"relation_ids": RELATIONS}),
    "positions": (
        {"position": "sinusoidal"},
        {"position_ids": 3 * torch.arange(LENGTH) + numbers(ROWS, 1, below=9)},
    ),
}
DECODER_ALONE = {"documents": ({"attention": Causal()}, {"document_ids": halves()})}


def extended(name: str, tensor: Tensor, length: int) -> Tensor:
    """An input of the prompt, for the prompt and what was written after it, `length` tokens."""
    new = length - LENGTH
    if name == "relation_ids":
        return torch.nn.functional.pad(tensor, (0, new, 0, new), value=-1)
    if name == "global_attention_mask":
        return torch.nn.functional.pad(tensor, (0, new))
    last = tensor[:, -1:].expand(-1, new)
    return torch.cat([tensor, last + (torch.arange(new) + 1 if name == "position_ids" else 0)], 1)


@torch.no_grad()
def greedy(model: Transformer, ids: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The likeliest tokens [B, NEW], each from a pass over all there is, without a state."""
    tokens = ids if model.encoder is None else torch.full((len(ids), 1), BOS)
    for _ in range(NEW):
        if model.encoder is None:
            whole = {name: extended(name, tensor, tokens.shape[1]) for name, tensor in inputs.items()}
            logits = model(tokens, **whole).logits
        else:
            logits = model(ids, decoder_input_ids=tokens, **inputs).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[:, -NEW:]


@pytest.mark.parametrize("shape", ["decoder", "pair"])
@pytest.mark.parametrize("name", [*CASES, *DECODER_ALONE])
def test_generation_is_the_full_forward(shape: str, name: str):
    if shape == "pair" and name in DECODER_ALONE:
        with pytest.raises(InputError, match="document_ids: an encoder-decoder does not take it"):
            built("transformer-tiny").generate(prompts(ROWS, LENGTH), document_ids=halves())
        return
    options, inputs = {**CASES, **DECODER_ALONE}[name]
    model, ids = (
        built("decoder-tiny" if shape == "decoder" else "transformer-tiny", **options),
        prompts(ROWS, LENGTH),
    )
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "eos": ()}
    expected = greedy(model, ids, inputs)
    got, without = model.generate(ids, **inputs, **settings), model.generate(ids, **settings)
    assert torch.equal(got.sequences[:, -NEW:], expected)
    assert not torch.allclose(got.scores, without.scores), "it matters"
    beams = model.generate(ids, **inputs, **settings, num_beams=3, num_return_sequences=3)
    for row in range(ROWS):  # rows and beams are moved about, and what belongs to them with them
        own = {key: tensor[row : row + 1] for key, tensor in inputs.items()}
        alone = model.generate(ids[row : row + 1], **own, **settings, num_beams=3, num_return_sequences=3)
        torch.testing.assert_close(beams.scores[3 * row : 3 * row + 3], alone.scores)


def test_rows_that_end_take_their_numbers_with_them():
    model = built("decoder-tiny", num_languages=3)
    ids, mask = left_padded([prompts(1, length, seed=length)[0] for length in (3, 7, 5, 4, 6)])
    langs = numbers(5, 1, below=3).expand(-1, 7).contiguous()
    together = model.generate(ids, mask, langs=langs, max_new_tokens=12, repetition_penalty=9.0, eos=(4, 9))
    assert len(set(together.lengths.tolist())) > 1, "some end before others"
    for row, tokens in enumerate(together.new_tokens()):
        real = mask[row].bool()
        own = {"input_ids": ids[row : row + 1, real], "langs": langs[row : row + 1, real]}
        alone = model.generate(**own, max_new_tokens=12, repetition_penalty=9.0, eos=(4, 9))
        assert alone.new_tokens()[0] == tokens


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"token_type_ids": halves()}, "token_type_ids: this model has none"),
        ({"langs": halves()}, "langs: this model has none"),
        ({"relation_ids": RELATIONS}, "relation_ids: this model's position scheme takes none"),
        ({"global_attention_mask": halves()}, "global_attention_mask: no pattern of the decoder reads it"),
        ({"segment_ids": halves()[:, 1:]}, "segment_ids: expected the shape"),
    ],
)
def test_what_a_model_does_not_read_is_refused(inputs: dict[str, Tensor], message: str):
    with pytest.raises(InputError, match=message):
        decoder().generate(prompts(ROWS, LENGTH), max_new_tokens=2, **inputs)
