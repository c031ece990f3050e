"""`generate`: continue a text, or write the target of a source."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.generation.beam import beam_search
from polyformer.generation.config import GenerationConfig
from polyformer.generation.decoder import Decoder, Writer, check_inputs
from polyformer.generation.generated import Generated, Written
from polyformer.generation.processors import Processor, no_end_before, repetition_penalty, sampling_processors
from polyformer.generation.search import Rules, drawn, likeliest, search
from polyformer.generation.stopping import Decode, Stopping


def generate(model: Writer, input_ids: Tensor, attention_mask: Tensor | None = None,
             config: GenerationConfig | None = None, streamer: Callable[[Tensor], None] | None = None,
             decode: Decode | None = None) -> Generated:  # fmt: skip
    """Write what follows `input_ids`, or what an encoder-decoder makes of them.

    Args:
        model: a `Transformer` with a decoder and a language-model head; put into evaluation mode meanwhile.
        input_ids: [B, T], prompts padded on the left, or sources padded on either side.
        attention_mask: [B, T], 1 for real tokens; each row is continued exactly as if it were alone.
        config: by default 64 tokens, each the likeliest.
        streamer: receives the tokens [N] of every step as they are written; see `TextStreamer`.
        decode: token ids to text, as a tokenizer has it; needed for `config.stop`.

    Returns:
        `Generated`, with `num_return_sequences` texts for every row. Texts end at `special.eos`.

    Raises:
        InputError: padding on the right of a prompt, more tokens than learned positions, stop strings
            without `decode`, a streamer with beam search, a model that does not write.
    """
    config = config or GenerationConfig()
    check_inputs(model, input_ids, attention_mask, config.max_new_tokens)
    _check_options(model, config, streamer, decode)
    with _evaluating(model), torch.no_grad():
        written = _write(model, input_ids, attention_mask, config, streamer, decode)
    prompt = input_ids if model.encoder is None else input_ids[:, :0]
    prompt = prompt.repeat_interleave(config.num_return_sequences, 0)
    sequences = torch.cat([prompt, written.tokens[:, : int(written.lengths.max())]], 1)
    return Generated(sequences, written.lengths, written.scores, prompt.shape[1])


def _write(model: Writer, input_ids: Tensor, attention_mask: Tensor | None, config: GenerationConfig,
           streamer: Callable[[Tensor], None] | None, decode: Decode | None) -> Written:  # fmt: skip
    special = model.config.special
    fill = next((one for one in (special.pad, special.eos) if one is not None), 0)
    decoder = Decoder(model, config.max_new_tokens)
    start = decoder.start(input_ids, attention_mask)
    processors = _processors(config, special.eos, start.history.shape[1])
    rules = Rules(
        config.max_new_tokens, fill, processors, Stopping(special.eos, config.stop, decode), streamer
    )
    if config.method == "beam":
        return beam_search(decoder, start, rules, config.beam, config.num_return_sequences)
    choose = drawn(config.sampling.seed, input_ids.device) if config.method == "sample" else likeliest
    return search(decoder, start, rules, choose, config.num_return_sequences)


def _processors(config: GenerationConfig, eos: int | None, prompt: int) -> list[Processor]:
    chosen = [repetition_penalty(config.repetition_penalty)] if config.repetition_penalty != 1.0 else []
    if config.min_new_tokens and eos is not None:
        # A history of n new tokens precedes new token n + 1, which may be the end when n + 1 > min.
        chosen.append(no_end_before(prompt + config.min_new_tokens, eos))
    return chosen + sampling_processors(config.sampling)


def _check_options(model: Writer, config: GenerationConfig, streamer: object, decode: Decode | None) -> None:
    if config.stop and decode is None:
        raise InputError("decode: stop strings are looked for in text; give the tokenizer's decode")
    if streamer is not None and config.method == "beam":
        raise InputError(
            "streamer: beam search knows its text only at the end; leave the streamer or num_beams out"
        )
    beams, vocabulary = config.beam.num_beams, model.config.vocab_size
    if beams >= vocabulary:
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
