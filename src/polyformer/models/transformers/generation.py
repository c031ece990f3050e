"""Wrapped models that generate: transformers' `generate` with our state."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers import modeling_outputs as outputs

from polyformer.core.host_values import next_labels
from polyformer.models.outputs import ModelOutput
from polyformer.models.transformers.base import PolyformerModel
from polyformer.models.transformers.cache import PolyformerCache, supports_kv_cache
from polyformer.models.transformers.inputs import (
    OTHER_TEXT_INPUTS,
    OUTPUT_ARGUMENTS,
    SOURCE,
    STATE,
    TEXT,
    Arguments,
    accepts,
    accepts_text,
)

# Inputs with a number per token; new tokens get the number of the last token.
GROWING = ("langs", "segment_ids", "document_ids")


# Families with a decoder, without an encoder, that takes shifted `labels`: the target of each token.
UNSHIFTED = ("bart", "bigbird_pegasus")


class GenerativeWrapper(PolyformerModel, GenerationMixin):
    """The base class of decoders with a language-model head."""

    @classmethod
    def can_generate(cls) -> bool:
        """Return True: `forward` returns the logits of the next token."""
        return True

    def _call(self, arguments: Arguments) -> tuple[ModelOutput, Arguments]:
        return self._logits(arguments)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Use our state instead of a dynamic cache; other kinds of cache stay transformers' own."""
        theirs: Any = super()
        past, kind = model_kwargs.get("past_key_values"), generation_config.cache_implementation
        if past is None and not supports_kv_cache(self.model):
            generation_config.use_cache = False
        elif past is not None or kind not in (None, "dynamic"):
            theirs._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = PolyformerCache(reserve=max_cache_length)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **more: Any) -> Tensor | None:
        """Return the mask [B, T] itself; transformers would make a mask with 4 axes for a static cache."""
        return attention_mask

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: Any) -> None:
        """Return None: our models count the real tokens themselves."""


class PolyformerForCausalLM(GenerativeWrapper):
    """A causal language model, which continues texts."""

    result: ClassVar[Any] = outputs.CausalLMOutputWithCrossAttentions

    @accepts_text("labels", at_end=("logits_to_keep",))
    def forward(self, arguments: Arguments) -> Any:
        """Return the result of transformers' causal language models; the arguments are the same."""
        origin = self.model.config.origin
        if origin is not None and origin.model_type in UNSHIFTED and "labels" in arguments:
            arguments.setdefault("shift_labels", arguments["labels"])
        if "shift_labels" in arguments:
            arguments.pop("labels", None)  # labels are the same targets
        return self._run(arguments)

    def _num_labelled(self, arguments: Arguments) -> Tensor:
        goals = arguments.get("shift_labels")
        if goals is None:
            mask, labels = arguments.get("attention_mask"), arguments["labels"]
            valid = None if mask is None else mask[:, -labels.shape[1] :].bool()
            goals = next_labels(labels, arguments.get("document_ids"), valid)
        return (goals != -100).sum()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the inputs of the next step, for the tokens that are not read yet, with languages and
        segments.

        `generate` accepts `inputs_embeds` because this signature names them.
        """
        theirs: Any = super()
        arguments = theirs.prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        ids = arguments.get("input_ids")
        length = (arguments["inputs_embeds"] if ids is None else ids).shape[1]
        for name in (*GROWING, "global_attention_mask"):
            if arguments.get(name) is not None:
                # The tokens before are in the cache.
                arguments[name] = arguments[name][:, -length:]
        return arguments

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *places: Any, **options: Any
    ) -> dict[str, Any]:
        more = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *places, **options)
        new = options.get("num_new_tokens", 1)
        for name in (*GROWING, "global_attention_mask"):
            if more.get(name) is not None:
                # An assistant may accept several tokens at once.
                last = more[name][:, -1:].expand(-1, new)
                more[name] = torch.cat([more[name], last if name in GROWING else 0 * last], 1)
        return more


class PolyformerForSeq2SeqLM(GenerativeWrapper):
    """A sequence-to-sequence model, which generates a text from another text."""

    both_result: ClassVar[Any] = outputs.Seq2SeqLMOutput

    forward = accepts(*TEXT[:2], *SOURCE, "labels", *TEXT[2:], *OTHER_TEXT_INPUTS, *STATE, *OUTPUT_ARGUMENTS)(
        PolyformerModel._run
    )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return labels [B, T] shifted right by one, after the decoder's start token, for data collators."""
        return self.model.shifted_right(labels, None)
