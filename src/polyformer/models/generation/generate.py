"""`generate`: continue a text, or generate the target of a source."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from polyformer.core.errors import InputError, caution
from polyformer.core.modules import names_wrong_types
from polyformer.models.generation.beam_search import beam_search
from polyformer.models.generation.config import DenoisingConfig, GenerationConfig, with_settings
from polyformer.models.generation.decoder import (
    Decoder,
    GenerativeModel,
    Mixture,
    Retrieval,
    check_inputs,
    check_shape,
    prompt_or_start_token,
)
from polyformer.models.generation.denoising import DenoisingRules, check_denoising, confidence, denoised
from polyformer.models.generation.processors import (
    Dola,
    blockwise_argmax,
    candidate_layers,
    processors,
    sampling_processors,
)
from polyformer.models.generation.results import (
    Decode,
    DraftStatistics,
    Generated,
    SearchResult,
    Stopping,
    TextStreamer,
    without_padding,
)
from polyformer.models.generation.search import SearchSettings, contrastive_search, sampler, search
from polyformer.models.generation.self_drafts import SelfSpeculator, self_drafter
from polyformer.models.generation.speculation import Draft, Speculator, check_draft, make_drafter

# Optional inputs per token of a prompt or source.
INPUTS = (
    *("position_ids", "document_ids", "token_type_ids", "langs"),
    *("segment_ids", "global_attention_mask", "relation_ids", "source_spans"),
)


@names_wrong_types
def generate(
    model: GenerativeModel,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    config: GenerationConfig | None = None,
    streamer: Callable[[Tensor], None] | None = None,
    decode: Decode | None = None,
    *,
    generator: torch.Generator | None = None,
    draft: Draft | None = None,
    mixture: Mixture | None = None,
    retrieval: Retrieval | None = None,
    compile: bool | None = None,
    **inputs_and_settings: Any,
) -> Generated:
    """Generate the continuation of `input_ids`, or the output of an encoder-decoder.

    Args:
        model: a `Transformer` with a decoder and a language-model head, or an encoder with `special.mask`
            (masked diffusion, `generation.denoising`), in evaluation mode (else a warning).
        input_ids: [B, T], prompts padded on the left, or sources; without ids `special.bos` begins one text.
        attention_mask: [B, T], 1 for real tokens; each row is continued exactly as in a batch of 1.
        config: by default 64 tokens, greedy; options by name (`max_new_tokens=20`) override it.
        streamer: receives the tokens [N] of every step as they are generated; see `TextStreamer`.
        decode: token ids to text, as in a tokenizer; needed for `config.stop`.
        generator: for sampling, instead of a `seed`; by default torch's.
        draft: proposes `draft_tokens` tokens per pass, for speed (`generation.speculation`): a smaller model
            with its vocabulary, "lookup" in repetitive texts, "self" with `drafting`, or a `Drafter`.
        mixture: a distribution that replaces the model's (`applications.retrieval.Mixture`).
        retrieval: the neighbours that the head 'semiparametric' reads (`applications.retrieval.Retrieval`).
        compile: run steps as a graph (`compiled_step`), by default on CUDA; a CPU compiles for 10 seconds.
        inputs_and_settings: `INPUTS` of the prompt or source, as in `forward`, and options of
            `GenerationConfig`. New tokens of a decoder-only model continue the last position, document, type,
            language and segment, are not global, and have no relations.

    Returns `Generated`, `num_return_sequences` texts for every row. Raises `InputError` for prompts padded on
    the right, too many tokens, ids outside the vocabulary, wrong or contradictory settings and models.
    """
    inputs = {name: x for name in INPUTS if (x := inputs_and_settings.pop(name, None)) is not None}
    config = with_settings(config or GenerationConfig(), inputs_and_settings)
    special = special_ids(model, config)
    input_ids = prompt_or_start_token(model, input_ids, special.start)
    writes = {"streamer": streamer, "decode": decode, "generator": generator}
    extras = {"draft": draft, "mixture": mixture, "retrieval": retrieval, "compile": compile}
    if model.decoder is None and model.config.special.mask is not None:
        others = {**inputs, **extras}
        return _denoised(model, input_ids, attention_mask, config, special, others, **writes)
    return _searched(model, input_ids, attention_mask, config, special, inputs, **writes, **extras)


def _searched(
    model: GenerativeModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    config: GenerationConfig,
    special: "GenerationTokens",
    inputs: Mapping[str, Tensor],
    *,
    streamer: Callable[[Tensor], None] | None,
    decode: Decode | None,
    generator: torch.Generator | None,
    draft: Draft | None,
    mixture: Mixture | None,
    retrieval: Retrieval | None,
    compile: bool | None,
) -> Generated:
    """Return `generate` of a decoder or an encoder-decoder, token by token."""
    check_shape(model, input_ids)
    width = input_ids.shape[1] if model.encoder is None else 1  # with an encoder: the start token
    max_new_tokens, beginning = config.lengths(width)[1], (input_ids, attention_mask, special.start)
    check_inputs(model, *beginning, max_new_tokens)
    check_options(model, config, special, streamer, decode)
    check_draft(draft, config, model, *beginning, max_new_tokens=max_new_tokens)
    generator = generator_for(config, generator, input_ids.device)
    contrast = _layer_contrast(model, config, mixture or retrieval)
    reading = {"dola": contrast, "compile": compile, "cache": config.cache}
    decoder = Decoder(model, max_new_tokens, mixture, retrieval, **reading)
    prompts = _prompts(input_ids, attention_mask, model.encoder is not None)
    _warn_of_training_mode(model=model, draft=draft)
    with decoder.recording(), torch.no_grad():
        active = processors(config, special.eos, width, input_ids.device)
        stops = stopping(config, special.eos, decode, streamer, *prompts)
        rules = SearchSettings(max_new_tokens, special.fill, active, stops, streamer)
        return _with_prompt(
            *prompts, *_search(decoder, (*beginning, inputs), rules, config, generator, draft)
        )


def _denoised(
    model: GenerativeModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    config: GenerationConfig,
    special: "GenerationTokens",
    others: Mapping[str, Any],
    *,
    streamer: Callable[[Tensor], None] | None,
    decode: Decode | None,
    generator: torch.Generator | None,
) -> Generated:
    """Return `generate` of a masked diffusion model; others: arguments that it does not take."""
    width, count = input_ids.shape[1], config.num_return_sequences
    new, asked = config.lengths(width)[1], config.denoising
    check_denoising(model, config, others, (input_ids, attention_mask), new)
    check_options(model, config, special, streamer, decode)
    _warn_of_training_mode(model=model)
    generator = generator_for(config, generator, input_ids.device)
    prompts = _prompts(input_ids, attention_mask, source=False)
    rules = DenoisingRules(
        new,
        new if asked.denoising_steps is None else asked.denoising_steps,
        model.config.special.mask,
        special.fill,
        sampling_processors(config.sampling),
        sampler(generator) if config.method == "sample" else blockwise_argmax,
        confidence(asked.remasking, generator),
        stopping(config, special.eos, decode, streamer, *prompts),
        streamer,
    )
    rows = torch.arange(len(input_ids), device=input_ids.device).repeat_interleave(count)
    padding = None if prompts[1] is None else prompts[1][rows]
    with torch.no_grad():
        result = denoised(model, input_ids[rows], padding, asked, rules, rows.tolist())
    return _with_prompt(*prompts, result, None)


# The arguments of `Decoder.start`.
Reads: TypeAlias = tuple[Tensor, Tensor | None, int | None, Mapping[str, Tensor]]


def _search(
    decoder: Decoder,
    reads: Reads,
    rules: SearchSettings,
    config: GenerationConfig,
    generator: torch.Generator | None,
    draft: Draft | None,
) -> tuple[SearchResult, DraftStatistics | None]:
    """Return the result of the search that `config` selects, and the statistics of a draft."""
    count = config.num_return_sequences
    if config.method == "beam":
        return beam_search(decoder, decoder.start(*reads), rules, config.beam, count), None
    if config.method == "contrastive":
        return contrastive_search(decoder, decoder.start(*reads), rules, config.contrastive), None
    # Beam search and contrastive search draw no numbers.
    choose = sampler(generator) if config.method == "sample" else blockwise_argmax
    if draft is None:
        return search(decoder, decoder.start(*reads), rules, choose, count), None
    speculator: Speculator
    if draft == "self":
        most = config.speculation.draft_tokens or decoder.model.drafting.count
        speculator = SelfSpeculator(decoder, self_drafter(decoder), most, choose, generator)
    else:
        processors, most = rules.processors, config.speculation.most(draft == "lookup")
        proposing = make_drafter(draft, decoder.model, decoder.max_new_tokens, processors, choose, config)
        speculator = Speculator(decoder, proposing, most, choose, generator)
    result = search(speculator, speculator.start(*reads), rules, speculator.choose, count)
    return result, speculator.drafted


def _layer_contrast(
    model: GenerativeModel, config: GenerationConfig, mixes: Mixture | Retrieval | None
) -> Dola | None:
    """Return the contrast of layers in `config`, if any; `mixes`: another change of the logits."""
    layers, stack = config.dola.dola_layers, model.decoder
    if layers is None or stack is None:
        return None
    if mixes is not None:
        raise InputError("dola_layers: a mixture or retrieval changes the same logits; leave one of them out")
    if stack.depth is not None:
        raise InputError(
            "dola_layers: not supported with a depth policy, which may skip layers; leave it out"
        )
    depth = model.config.decoder.num_hidden_layers
    candidates = candidate_layers(layers, depth, model.config.embedding.tied)
    return Dola(candidates, model.predictions, stack.final_norm)


def _prompts(input_ids: Tensor, attention_mask: Tensor | None, source: bool) -> tuple[Tensor, Tensor | None]:
    """Return the tokens that the new ones follow, none after a `source`, and their padding [B]."""
    if source:
        return input_ids[:, :0], None
    return input_ids, None if attention_mask is None else (attention_mask == 0).sum(1)


def stopping(
    config: GenerationConfig,
    eos: tuple[int, ...],
    decode: Decode | None,
    streamer: Callable[[Tensor], None] | None,
    prompts: Tensor,
    padding: Tensor | None,
) -> Stopping:
    """Return the conditions that end a text; a streamer of text receives its prompt."""
    if not config.stop and not isinstance(streamer, TextStreamer):
        return Stopping(eos)
    before = without_padding(prompts, padding)
    if isinstance(streamer, TextStreamer):
        streamer.begin(before)
    return Stopping(eos, config.stop, decode, before)


def _with_prompt(
    prompt: Tensor, padding: Tensor | None, result: SearchResult, drafted: DraftStatistics | None
) -> Generated:
    """Return the texts of a search with their prompts [B, T]; each prompt has the same number of texts."""
    copies = len(result.tokens) // len(prompt)
    prompt = prompt.repeat_interleave(copies, 0)
    padding = None if padding is None else padding.repeat_interleave(copies)
    sequences = torch.cat([prompt, result.tokens[:, : int(result.lengths.max())]], 1)
    return Generated(sequences, result.lengths, result.scores, prompt.shape[1], drafted, padding)


def generator_for(
    config: GenerationConfig, generator: torch.Generator | None, device: torch.device
) -> torch.Generator | None:
    """Return the generator for sampling; None for torch's default."""
    if generator is None:
        seed = config.sampling.seed
        return None if seed is None else torch.Generator(device).manual_seed(seed)
    if config.method != "sample":
        raise InputError("generator: only sampling uses it; set do_sample, or leave it out")
    if config.sampling.seed is not None:
        raise InputError("generator and seed: sampling uses only one of them; leave the other out")
    return generator


@dataclasses.dataclass(frozen=True)
class GenerationTokens:
    """The special tokens of one call; `fill` pads texts that have ended."""

    start: int | None
    eos: tuple[int, ...]
    fill: int


def special_ids(model: GenerativeModel, config: GenerationConfig) -> GenerationTokens:
    """Return the special tokens of the generation config, with the model's as defaults."""
    own, asked = model.config.special, config.special
    eos = asked.eos
    if eos is None:
        # Some config.json name an id beyond their table.
        eos = () if own.eos is None or own.eos >= model.config.vocab_size else (own.eos,)
    fill = next((token for token in (asked.pad, own.pad, *eos) if token is not None), 0)
    return GenerationTokens(own.bos if asked.start is None else asked.start, eos, fill)


def check_options(
    model: GenerativeModel,
    config: GenerationConfig,
    special: GenerationTokens,
    streamer: object,
    decode: Decode | None,
) -> None:
    """Raise `InputError` for options that the model or another argument of `generate` excludes."""
    if config.stop and decode is None:
        raise InputError("decode: stop strings require it; pass the tokenizer's decode")
    asked, default = config.denoising, DenoisingConfig()
    for field in dataclasses.fields(asked) if model.decoder is not None else ():
        if getattr(asked, field.name) != getattr(default, field.name):
            raise InputError(
                f"{field.name}: only masked diffusion models (encoders with special.mask) use it; leave it "
                "out"
            )
    if streamer is not None and config.method == "beam":
        raise InputError(
            "streamer: beam search knows its text only at the end; leave the streamer or num_beams out"
        )
    if config.cache is not None and model.encoder is not None:
        raise InputError(
            "cache: a policy is for a decoder without an encoder, which reads its prompt; leave the cache out"
        )
    beams, vocabulary = config.beam.num_beams, model.config.vocab_size
    named = {"special.eos": special.eos, **config.constraints.ids()}
    if special.start is not None and (model.encoder is not None or config.special.start is not None):
        named["special.start"] = (special.start,)
    for name, ids in named.items():
        if any(not 0 <= token < vocabulary for token in ids):
            raise InputError(f"{name}: expected ids from 0 to {vocabulary - 1}, got {list(ids)}")
    # Every step needs num_beams extensions that do not end.
    if beams + max(1, len(special.eos)) > vocabulary:
        raise InputError(f"num_beams: expected fewer than the {vocabulary} tokens, got {beams}")


def _warn_of_training_mode(**models: object) -> None:
    """Warn that dropout is active in an argument of `generate` that is a model in training mode."""
    for name, model in models.items():
        if getattr(model, "training", False):
            caution(
                f"{name}: expected a model in evaluation mode, got training mode, in which dropout changes "
                f"the text; call {name}.eval() first"
            )
