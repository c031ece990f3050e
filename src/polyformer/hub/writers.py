"""Wrapped models that write: transformers' `generate`, over our state."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers import modeling_outputs as outputs

from polyformer.core.errors import InputError, quote
from polyformer.core.labels import next_labels
from polyformer.hub.base import PolyformerModel
from polyformer.hub.cache import PolyformerCache, caches
from polyformer.hub.inputs import ASKED, MORE_TEXT, SOURCE, STATE, TEXT, Arguments, taking
from polyformer.outputs import ModelOutput

GROWING = ("langs", "segment_ids", "document_ids")
"""Numbers of tokens, of which new tokens have the last one."""


UNSHIFTED = ("bart",)
"""Families whose decoder alone is given what each token should predict as `labels`."""


class Writer(PolyformerModel, GenerationMixin):
    """What decoders with a language-model head have in common."""

    @classmethod
    def can_generate(cls) -> bool:
        """True: `forward` returns the logits of the next token."""
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
        """Our state in place of theirs, where attention keeps one."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise InputError(
                f"cache_implementation: this model keeps a state of its own, got "
                f"{quote(generation_config.cache_implementation)}; leave it out"
            )
        past = model_kwargs.get("past_key_values")
        if past is not None:
            past._is_user_defined = True
        elif not caches(self.model):
            generation_config.use_cache = False
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = PolyformerCache(reserve=max_cache_length)

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: Any) -> None:
        """None: our models count the real tokens themselves."""


class PolyformerForCausalLM(Writer):
    """Continues texts."""

    result: ClassVar[Any] = outputs.CausalLMOutputWithCrossAttentions

    @taking(*TEXT, "labels", *MORE_TEXT, *STATE, *ASKED, "logits_to_keep")
    def forward(self, arguments: Arguments) -> Any:
        """As transformers' causal language models are called, with their results."""
        origin = self.model.config.origin
        if origin is not None and origin.model_type in UNSHIFTED and "labels" in arguments:
            arguments.setdefault("shift_labels", arguments["labels"])
        if "shift_labels" in arguments:
            arguments.pop("labels", None)  # they say the same
        return self._answered(arguments)

    def _counted(self, arguments: Arguments) -> Tensor:
        goals = arguments.get("shift_labels")
        if goals is None:
            mask, labels = arguments.get("attention_mask"), arguments["labels"]
            valid = None if mask is None else mask[:, -labels.shape[1] :].bool()
            goals = next_labels(labels, arguments.get("document_ids"), valid)
        return (goals != -100).sum()

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """The inputs of the next step: languages, segments and the like of the tokens not read yet."""
        arguments = GenerationMixin.prepare_inputs_for_generation(self, input_ids, **kwargs)  # type: ignore[arg-type]
        ids = arguments.get("input_ids")
        length = (arguments["inputs_embeds"] if ids is None else ids).shape[1]
        for name in (*GROWING, "global_attention_mask"):
            if arguments.get(name) is not None:
                arguments[name] = arguments[name][:, -length:]
        return arguments

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *places: Any, **options: Any
    ) -> dict[str, Any]:
        more = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *places, **options)
        new = options.get("num_new_tokens", 1)
        for name in (*GROWING, "global_attention_mask"):
            if more.get(name) is not None:
                last = more[name][:, -1:].expand(-1, new)
                more[name] = torch.cat([more[name], last if name in GROWING else 0 * last], 1)
        return more


class PolyformerForSeq2SeqLM(Writer):
    """Makes one text of another."""

    both_result: ClassVar[Any] = outputs.Seq2SeqLMOutput

    @taking(*TEXT[:2], *SOURCE, "labels", *TEXT[2:], *MORE_TEXT, *STATE, *ASKED)
    def forward(self, arguments: Arguments) -> Any:
        """As transformers' encoder-decoders are called, with their results."""
        return self._answered(arguments)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """labels [B, T] one token later, after the token that output starts from: what collators ask for."""
        return self.model.shifted_right(labels, None)
