"""The `draft` argument of `generate`: its checks, and the drafter that it selects."""

import contextlib
from collections.abc import Sequence
from typing import Literal, TypeAlias, cast

from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.evaluation_mode import evaluating
from polyformer.models.generation.config import GenerationConfig, SpeculationConfig
from polyformer.models.generation.constraints import Processor
from polyformer.models.generation.decoder import Writer, check_inputs
from polyformer.models.generation.draft_model import DraftModel
from polyformer.models.generation.drafter import Drafter
from polyformer.models.generation.lookup import Lookup
from polyformer.models.generation.search import Choose

Draft: TypeAlias = Writer | Drafter | Literal["lookup"]


def drafter(
    draft: Draft,
    model: Writer,
    room: int,
    shaping: Sequence[Processor],
    choose: Choose,
    config: GenerationConfig,
) -> Drafter:
    """Return the drafter for `draft`, for texts of `model` with these processors and this choice."""
    if draft == "lookup":
        return Lookup(config.speculation.lookup_ngram, model.encoder is not None)
    if isinstance(draft, nn.Module):
        return DraftModel(cast(Writer, draft), room, shaping, choose, config.method == "sample")
    return cast(Drafter, draft)


def evaluated(draft: Draft | None) -> contextlib.AbstractContextManager[None]:
    """Return a context with a draft model in evaluation mode."""
    return evaluating(draft) if isinstance(draft, nn.Module) else contextlib.nullcontext()


def check_draft(
    draft: Draft | None,
    config: GenerationConfig,
    model: Writer,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    first: int | None,
    room: int,
) -> None:
    """Raise `InputError` for a draft that does not fit `model` or the settings, or cannot generate that many
    tokens.

    The inputs are the same as in `check_inputs`.
    """
    if draft is None:
        if config.speculation != SpeculationConfig():
            raise InputError(
                "draft_tokens and lookup_ngram: only a draft uses them; give draft='lookup' or a model"
            )
        return
    ways = {"beam": "num_beams", "contrastive": "penalty_alpha"}
    if config.method in ways:
        raise InputError(
            f"draft: {config.method} search compares texts, and no draft says which; leave the draft or "
            f"{ways[config.method]} out"
        )
    if config.dola.dola_layers is not None and isinstance(draft, nn.Module):
        raise InputError("draft: a model without the contrast of layers; leave it or dola_layers out")
    _check_memory(model, input_ids.shape[1] + room)
    if isinstance(draft, nn.Module):
        _check_model(draft, model)
        try:
            check_inputs(cast(Writer, draft), input_ids, attention_mask, first, room)
        except InputError as error:
            raise InputError(f"draft: of the draft model, {error}") from error
    elif draft != "lookup" and not hasattr(draft, "propose"):
        raise InputError(f"draft: expected a model, 'lookup' or a Drafter, got {quote(draft)}")


def _check_memory(model: Writer, tokens: int) -> None:
    """Raise `InputError` if a text would depend on how many tokens are read in one pass.

    Tokens read together all see the whole memory, and so reach farther than single tokens would.
    """
    memory = None if model.decoder is None else model.decoder.memory
    if memory is None or tokens <= memory.length:
        return
    pattern = getattr(model.decoder.mechanism, "pattern", None) if model.decoder else None
    reach = None if pattern is None else pattern.distance_range()
    if memory.has_store or reach is None or reach[1] > memory.length:
        raise InputError(
            f"draft: {tokens} tokens are more than the memory of {memory.length}, and a text would depend on "
            "how many are read at once; make the memory longer, attend within it (Window), or leave it out"
        )


def _check_model(draft: nn.Module, model: Writer) -> None:
    if not hasattr(draft, "logits_at"):
        raise InputError(f"draft: expected a polyformer Transformer, got {type(draft).__name__}")
    writer = cast(Writer, draft)
    if writer.decoder is None or not writer.head.predicts_next:
        raise InputError(
            "draft: needs a decoder with a language-model head; this model predicts no next token"
        )
    if (writer.encoder is None) != (model.encoder is None):
        kinds = [
            "a decoder alone" if part.encoder is None else "an encoder-decoder" for part in (model, writer)
        ]
        raise InputError(f"draft: expected {kinds[0]}, as the model is, got {kinds[1]}")
    sizes = [part.config.vocab_size for part in (model, writer)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"draft: expected a model of the same vocabulary of {sizes[0]} tokens, got one of {sizes[1]}; "
            "use one with the same tokenizer, or draft='lookup'"
        )
    devices = [next(part.parameters()).device for part in (model, writer)]
    if devices[0] != devices[1]:
        raise InputError(f"draft: expected a model on {devices[0]}, as the other is, got one on {devices[1]}")
