"""The arguments of `forward`: signatures from tables; every argument is used, or refused by its name."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.patterns.global_tokens import reads_marks
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.packed_sequences import packed_sequences

Arguments = dict[str, Any]

TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
OTHER_TEXT_INPUTS = (
    *("inputs_embeds", "global_attention_mask", "langs"),
    *("document_ids", "segment_ids", "relation_ids"),
)
STATE = ("past_key_values", "use_cache")
SOURCE = ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs", "decoder_inputs_embeds")
OUTPUT_ARGUMENTS = ("output_attentions", "output_hidden_states", "return_dict")

# Arguments that are used but not in the signature, from which transformers' tools read column names.
UNLISTED_ARGUMENTS = (
    *("num_items_in_batch", "shift_labels", "lengths"),
    *("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"),
)

# Arguments of transformers' models that ours cannot use, with the alternative.
UNSUPPORTED_ARGUMENTS = {
    "encoder_hidden_states": "a single stack has no cross-attention; wrap an encoder-decoder",
    "encoder_attention_mask": "a single stack has no cross-attention; wrap an encoder-decoder",
    "cache": "pass past_key_values",
    "past_buckets_states": "pass past_key_values",
    "question_lengths": "the first separator in the ids ends the question; leave it out",
    "num_hashes": "set it in the model's configuration",
    "output_router_logits": "the loss in training includes the load balancing of experts; leave it out",
    "is_causal": "a decoder is causal and an encoder is not; leave it out",
}

# Arguments of `UNSUPPORTED_ARGUMENTS` that are allowed if they are false.
ALLOWED_IF_FALSE = ("output_router_logits",)

# Arguments without effect: other arguments determine the same, or transformers' own model ignores them.
IGNORED_ARGUMENTS = ("max_length_q", "max_length_k", "rewards")


# Families that use token types as token ids, and add their embeddings.
ADD_TOKENS = ("gpt2", "openai-gpt", "ctrl", "gpt_neo", "gptj", "xlm")

# Families that derive padding from the ids if there is no mask.
FIND_PADDING = ("xlm",)

# Families with positions from the padding token's id plus 1 on; padding has the position before.
OFFSET = ("roberta", "xlm-roberta", "longformer")


def accepts(*names: str, var_keyword: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for `forward(self, arguments)`, with these optional arguments in this order.

    The result also accepts `UNLISTED_ARGUMENTS`, and unknown arguments that are None (`var_keyword`: the
    signature shows them). Raises `InputError` for `UNSUPPORTED_ARGUMENTS`, and TypeError for others.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forward(self: Any, *values: Any, **arguments: Any) -> Any:
            if len(values) > len(names):
                raise TypeError(f"forward() takes {len(names)} arguments, got {len(values)}")
            twice = [name for name in names[: len(values)] if name in arguments]
            if twice:
                raise TypeError(f"forward() got multiple values for argument {twice[0]!r}")
            named = {**dict(zip(names, values)), **arguments}
            return function(self, _checked({k: v for k, v in named.items() if v is not None}, names))

        kinds = inspect.Parameter
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [kinds("self", kinds.POSITIONAL_OR_KEYWORD)]
            + [kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=None) for name in names]
            + ([kinds("kwargs", kinds.VAR_KEYWORD)] if var_keyword else [])
        )
        return forward

    return decorate


def accepts_text(
    *names: str, source: bool = False, state: bool = True, at_end: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for models of texts, in the order of transformers: text, `names`, and the rest.

    source: whether the model may be an encoder-decoder. state: whether it may continue from a cache.
    """
    rest = (*OTHER_TEXT_INPUTS, *(SOURCE if source else ()), *(STATE if state else ()), *OUTPUT_ARGUMENTS)
    return accepts(*TEXT, *names, *rest, *at_end)


def _checked(arguments: Arguments, names: tuple[str, ...]) -> Arguments:
    kept = {}
    for name, value in arguments.items():
        if name in names or name in UNLISTED_ARGUMENTS:
            kept[name] = value
        elif name in UNSUPPORTED_ARGUMENTS:
            if name not in ALLOWED_IF_FALSE or value:
                raise InputError(f"{name}: not supported here; {UNSUPPORTED_ARGUMENTS[name]}")
        elif name not in IGNORED_ARGUMENTS:
            raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
    return kept


def resolve_text_inputs(arguments: Arguments, model: Transformer, pad: int | None) -> None:
    """Convert the inputs of the text in `arguments`, in place, to the inputs of our models."""
    ids = arguments.get("input_ids", arguments.get("inputs_embeds"))
    if ids is None:  # the source is encoded already
        return
    origin = model.config.origin
    _resolve_mask(arguments, ids, pad, origin is not None and origin.model_type in FIND_PADDING)
    if origin is not None and origin.model_type in OFFSET and "position_ids" in arguments:
        arguments["position_ids"] = _positions_from_0(
            arguments["position_ids"], (pad or 0) + 1, arguments.get("attention_mask")
        )
    if "inputs_embeds" in arguments and getattr(model.config.head, "end_token", None) is not None:
        raise InputError("inputs_embeds: this head finds the end of the text in its ids; pass input_ids")
    _resolve_documents(arguments, ids, model)
    if model.encoder is None:
        unmasked = "attention_mask" not in arguments and "input_ids" in arguments
        # Transformers pools the last token that is not padding.
        if unmasked and pad is not None and getattr(model.config.head, "pooling", None) == "last":
            arguments["attention_mask"] = _mask_up_to_last(arguments["input_ids"] != pad)
    marks = arguments.get("global_attention_mask")
    # Tools pass zeros to every model.
    if marks is not None and not bool(marks.any()) and not _reads_global_tokens(model):
        del arguments["global_attention_mask"]
    _resolve_token_types(arguments, model)  # last, since it may replace the ids by their embeddings


def _resolve_mask(arguments: Arguments, ids: Tensor, pad: int | None, find_padding: bool) -> None:
    """Add the attention mask of `lengths`, or for some families that of the padding in the ids."""
    if "lengths" in arguments:
        if "attention_mask" in arguments:
            raise InputError("lengths: attention_mask determines the same; leave one of them out")
        lengths = arguments.pop("lengths")
        arguments["attention_mask"] = torch.arange(ids.shape[1], device=lengths.device) < lengths[:, None]
    if not find_padding or "attention_mask" in arguments or pad is None or ids.dim() != 2:
        return
    pads = arguments.get("input_ids", ids) == pad
    if bool(pads.any()):
        places = torch.arange(ids.shape[1], device=ids.device)
        arguments["attention_mask"] = places < (~pads).sum(1, keepdim=True)


def _resolve_token_types(arguments: Arguments, model: Transformer) -> None:
    """Drop token types of all zeros for a model without token types, unless its family adds their embeddings.

    Raises `InputError` for other token types in a model without token types.
    """
    types = arguments.get("token_type_ids")
    if types is None or model.config.embedding.type_vocab_size:
        return
    origin = model.config.origin
    if origin is not None and origin.model_type in ADD_TOKENS:
        ids, vectors = arguments.pop("input_ids", None), arguments.get("inputs_embeds")
        own = model.tokens(ids) if vectors is None else vectors
        arguments["inputs_embeds"] = own + model.tokens(arguments.pop("token_type_ids"))
        return
    if bool(types.any()):
        raise InputError(
            "token_type_ids: this model has none (embedding.type_vocab_size is 0); leave them out"
        )
    del arguments["token_type_ids"]


def _positions_from_0(positions: Tensor, offset: int, mask: Tensor | None) -> Tensor:
    counted = positions - offset
    real = counted if mask is None else counted.masked_fill(mask == 0, 0)
    if bool((real < 0).any()):
        raise InputError(
            f"position_ids: positions of this family start at {offset}, got {int(positions.min())}"
        )
    return counted.clamp_min(0)


def _resolve_documents(arguments: Arguments, ids: Tensor, model: Transformer) -> None:
    """Set document_ids of packed documents, from numbers, ends, or positions of a decoder that restart.

    Raises `InputError` for numbers or ends that do not fit the ids, or of an encoder-decoder.
    """
    positions = arguments.get("position_ids")
    names = "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"
    numbers, ends, keys = (arguments.pop(name, None) for name in names)
    packed = next((name for name, value in zip(names, (numbers, ends)) if value is not None), None)
    if packed is not None and model.encoder is not None and model.decoder is not None:
        raise InputError(f"{packed}: an encoder-decoder reads a single text per row; pass attention_mask")
    if "document_ids" in arguments:
        return
    if numbers is not None:
        arguments["document_ids"] = numbers.long()
    elif ends is not None:
        documents = packed_sequences(ends, keys, *ids.shape[:2])
        arguments["document_ids"] = documents - documents[:, :1]  # a row of one sequence has number 0
    elif (
        positions is not None
        and model.encoder is None
        and not {"attention_mask", "past_key_values"} & arguments.keys()
    ):
        # Flash attention's convention: a position of 0 begins another document.
        documents = packed_documents(positions.expand(ids.shape[:2]))
        if documents is not None:
            arguments["document_ids"] = documents


def packed_documents(positions: Tensor) -> Tensor | None:
    """Return documents [B, T], which start where positions [B, T] do not rise by 1; None for one per row."""
    breaks = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
    return breaks.cumsum(-1) if bool(breaks.any()) else None


def _mask_up_to_last(real: Tensor) -> Tensor | None:
    """Return the mask [B, T] of all tokens up to the last real token; None if every last token is real."""
    places = torch.arange(real.shape[1], device=real.device)
    last = (places * real).amax(1, keepdim=True)
    return None if bool(real[:, -1].all()) else (places <= last).long()


def _reads_global_tokens(model: Transformer) -> bool:
    stack = model.encoder or model.decoder
    return stack is not None and reads_marks(stack.mechanism)
