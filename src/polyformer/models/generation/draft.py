"""The `draft` argument of `generate`: its checks, and the drafter that it selects."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, cast

from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.models.generation.config import GenerationConfig, SpeculationConfig
from polyformer.models.generation.constraints import Processor
from polyformer.models.generation.decoder import GenerativeModel, check_inputs
from polyformer.models.generation.drafter import Drafter, DraftModel, Lookup
from polyformer.models.generation.search import Choose

Draft: TypeAlias = GenerativeModel | Drafter | Literal["lookup"]


def make_drafter(
    draft: Draft,
    model: GenerativeModel,
    max_new_tokens: int,
    processors: Sequence[Processor],
    choose: Choose,
    config: GenerationConfig,
) -> Drafter:
    """Return the drafter for `draft`, for texts of `model` with these processors and this choice."""
    if draft == "lookup":
        return Lookup(config.speculation.lookup_ngram, model.encoder is not None)
    if isinstance(draft, nn.Module):
        return DraftModel(
            cast(GenerativeModel, draft), max_new_tokens, processors, choose, config.method == "sample"
        )
    return cast(Drafter, draft)


def check_draft(
    draft: Draft | None,
    config: GenerationConfig,
    model: GenerativeModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    first: int | None,
    *,
    max_new_tokens: int,
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
    options = {"beam": "num_beams", "contrastive": "penalty_alpha"}
    if config.method in options:
        raise InputError(
            f"draft: speculative decoding does not support {config.method} search; leave the draft or "
            f"{options[config.method]} out"
        )
    if config.dola.dola_layers is not None and isinstance(draft, nn.Module):
        raise InputError("draft: a draft model does not support dola_layers; leave one of them out")
    if config.cache is not None and config.cache.after_every_call:
        raise InputError(
            f"draft: the cache policy {quote(config.cache.kind)} drops keys after every pass, so drafts "
            "would change the text; leave one of them out, or use 'snapkv'"
        )
    _check_memory(model, input_ids.shape[1] + max_new_tokens)
    if isinstance(draft, nn.Module):
        _check_model(draft, model)
        try:
            check_inputs(cast(GenerativeModel, draft), input_ids, attention_mask, first, max_new_tokens)
        except InputError as error:
            raise InputError(f"draft: of the draft model, {error}") from error
    elif draft != "lookup" and not hasattr(draft, "propose"):
        raise InputError(f"draft: expected a model, 'lookup' or a Drafter, got {quote(draft)}")


def _check_memory(model: GenerativeModel, tokens: int) -> None:
    """Raise `InputError` if a text would depend on how many tokens are read in one pass.

    Tokens read together all see the whole memory, and so reach farther than single tokens would.
    """
    memory = None if model.decoder is None else model.decoder.memory
    if memory is None or tokens <= memory.length:
        return
    pattern = getattr(model.decoder.mechanism, "pattern", None) if model.decoder else None
    reach = None if pattern is None else pattern.structure.distances
    if memory.has_store or reach is None or reach[1] > memory.length:
        raise InputError(
            f"draft: {tokens} tokens are more than the memory of {memory.length}, and a text would depend on "
            "how many are read at once; make the memory longer, attend within it (Window), or leave it out"
        )


def _check_model(draft: nn.Module, model: GenerativeModel) -> None:
    if not hasattr(draft, "logits_at"):
        raise InputError(f"draft: expected a polyformer Transformer, got {type(draft).__name__}")
    draft_model = cast(GenerativeModel, draft)
    if draft_model.decoder is None or not draft_model.head.predicts_next:
        raise InputError(
            "draft: needs a decoder with a language-model head; this model predicts no next token"
        )
    if (draft_model.encoder is None) != (model.encoder is None):
        names = [
            "a decoder-only model" if part.encoder is None else "an encoder-decoder"
            for part in (model, draft_model)
        ]
        raise InputError(f"draft: expected {names[0]}, as the model is, got {names[1]}")
    sizes = [part.config.vocab_size for part in (model, draft_model)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"draft: expected a model of the same vocabulary of {sizes[0]} tokens, got one of {sizes[1]}; "
            "use one with the same tokenizer, or draft='lookup'"
        )
    devices = [next(part.parameters()).device for part in (model, draft_model)]
    if devices[0] != devices[1]:
        raise InputError(f"draft: expected a model on {devices[0]}, as the other is, got one on {devices[1]}")
