"""`generate`: continue a text, or write the target of a source."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.generation.beam import beam_search
from polyformer.generation.config import GenerationConfig
from polyformer.generation.decoder import Decoder, Start, Writer, check_inputs, check_shape
from polyformer.generation.generated import Generated, Written
from polyformer.generation.largest import likeliest
from polyformer.generation.processors import processors
from polyformer.generation.search import Rules, drawn, search
from polyformer.generation.stopping import Decode, Stopping


def generate(model: Writer, input_ids: Tensor, attention_mask: Tensor | None = None,
             config: GenerationConfig | None = None, streamer: Callable[[Tensor], None] | None = None,
             decode: Decode | None = None) -> Generated:  # fmt: skip
    """Write what follows `input_ids`, or what an encoder-decoder makes of them.

    Args:
        model: a `Transformer` with a decoder and a language-model head; put into evaluation mode meanwhile.
        input_ids: [B, T], prompts padded on the left, or sources padded on either side.
        attention_mask: [B, T], 1 for real tokens; each row is continued exactly as if it were alone.
        config: by default 64 tokens, each the likeliest, up to the model's `special.eos`.
        streamer: receives the tokens [N] of every step as they are written; see `TextStreamer`.
        decode: token ids to text, as a tokenizer has it; needed for `config.stop`.

    Returns:
        `Generated`, with `num_return_sequences` texts for every row.

    Raises:
        InputError: padding on the right of a prompt, more tokens than learned positions, a prompt longer than
            `max_length`, stop strings without `decode`, a streamer with beam search, ids outside the
            vocabulary, a model that does not write.
    """
    config = config or GenerationConfig()
    chosen = _chosen(model, config)
    check_shape(model, input_ids)
    width = input_ids.shape[1] if model.encoder is None else 1
    _, room = config.lengths(width)
    check_inputs(model, input_ids, attention_mask, chosen.start, room)
    _check_options(model, config, chosen, streamer, decode)
    with _evaluating(model), torch.no_grad():
        decoder = Decoder(model, room)
        start = decoder.start(input_ids, attention_mask, chosen.start)
        rules = Rules(
            room, chosen.fill, processors(config, chosen.eos, width, input_ids.device),
            Stopping(chosen.eos, config.stop, decode), streamer,
        )  # fmt: skip
        written = _write(decoder, start, rules, config)
    prompt = input_ids if model.encoder is None else input_ids[:, :0]
    prompt = prompt.repeat_interleave(config.num_return_sequences, 0)
    sequences = torch.cat([prompt, written.tokens[:, : int(written.lengths.max())]], 1)
    return Generated(sequences, written.lengths, written.scores, prompt.shape[1])


def _write(decoder: Decoder, start: Start, rules: Rules, config: GenerationConfig) -> Written:
    if config.method == "beam":
        return beam_search(decoder, start, rules, config.beam, config.num_return_sequences)
    choose = likeliest
    if config.method == "sample":
        choose = drawn(config.sampling.seed, start.logits.device)
    return search(decoder, start, rules, choose, config.num_return_sequences)


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The special tokens of one call; `fill` follows texts that have ended."""

    start: int | None
    eos: tuple[int, ...]
    fill: int


def _chosen(model: Writer, config: GenerationConfig) -> _Chosen:
    """What the generation asks for, or else what the model has."""
    own, asked = model.config.special, config.special
    eos = asked.eos
    if eos is None:
        eos = () if own.eos is None or own.eos >= model.config.vocab_size else (own.eos,)
    fill = next((one for one in (asked.pad, own.pad, *eos) if one is not None), 0)
    return _Chosen(own.bos if asked.start is None else asked.start, eos, fill)


def _check_options(model: Writer, config: GenerationConfig, chosen: _Chosen, streamer: object,
                   decode: Decode | None) -> None:  # fmt: skip
    if config.stop and decode is None:
        raise InputError("decode: stop strings are looked for in text; give the tokenizer's decode")
    if streamer is not None and config.method == "beam":
        raise InputError(
            "streamer: beam search knows its text only at the end; leave the streamer or num_beams out"
        )
    beams, vocabulary = config.beam.num_beams, model.config.vocab_size
    named = {"special.eos": chosen.eos, **config.constraints.ids()}
    if model.encoder is not None and chosen.start is not None:
        named["special.start"] = (chosen.start,)
    for name, ids in named.items():
        if any(not 0 <= one < vocabulary for one in ids):
            raise InputError(f"{name}: expected ids from 0 to {vocabulary - 1}, got {list(ids)}")
    if beams + max(1, len(chosen.eos)) > vocabulary:
        raise InputError(f"num_beams: expected fewer than the {vocabulary} tokens, got {beams}")


@contextlib.contextmanager
def _evaluating(model: Writer) -> Iterator[None]:
    """The model in evaluation mode, and afterwards every part of it as it was."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
