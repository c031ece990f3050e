"""A polyformer inside transformers: `AutoModel*`, `pipeline`, `Trainer` and PEFT take it as one of their own.

    import polyformer.hub                                      # registers the model_type "polyformer"
    model = polyformer.hub.wrap(polyformer.from_pretrained(DIR))
    model.save_pretrained(OUT)                                 # for AutoModelForMaskedLM.from_pretrained

Any model can be wrapped, of a public family or not. Needs transformers (`pip install 'polyformer[hub]'`).
"""

from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from transformers import modeling_outputs as outputs

from polyformer.architecture import ModelConfig
from polyformer.core.errors import InputError
from polyformer.generation.hub import from_hub
from polyformer.model import Transformer


class PolyformerConfig(transformers.PreTrainedConfig):
    """`polyformer`: a `ModelConfig` as plain data."""

    model_type = "polyformer"
    polyformer: dict[str, Any] | None = None

    def __post_init__(self, **options: Any) -> None:
        special = (self.polyformer or {}).get("special", {})
        for role, name in (("pad", "pad_token_id"), ("bos", "bos_token_id"), ("eos", "eos_token_id")):
            options.setdefault(name, special.get(role))
        head = (self.polyformer or {}).get("head", {})
        if "num_labels" in head and self.id2label is None:
            options.setdefault("num_labels", head["num_labels"])
        self.is_encoder_decoder = all((self.polyformer or {}).get(side) for side in ("encoder", "decoder"))
        super().__post_init__(**options)

    def transformer(self) -> ModelConfig:
        """Our configuration."""
        if self.polyformer is None:
            raise InputError(
                "polyformer: expected the model's configuration, got none; use polyformer.hub.wrap"
            )
        return ModelConfig.from_dict(self.polyformer)


class PolyformerModel(transformers.PreTrainedModel):
    """What all wrappers have in common; by itself the one of models without a task."""

    config_class = PolyformerConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    head: ClassVar[str] = "embed"

    def __init__(self, config: PolyformerConfig):
        super().__init__(config)
        self.model = Transformer(config.transformer())
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: `Transformer` has initialised itself."""

    def activation_checkpointing_enable(self, *options: Any, **more: Any) -> None:
        """Layers are computed again in the backward pass, by our own means, which have no options."""
        self._recompute(True)

    def activation_checkpointing_disable(self) -> None:
        """The reverse."""
        self._recompute(False)

    gradient_checkpointing_enable = activation_checkpointing_enable
    gradient_checkpointing_disable = activation_checkpointing_disable

    def _recompute(self, wanted: bool) -> None:
        for stack in (self.model.encoder, self.model.decoder):
            if stack is not None:
                stack.recompute = wanted

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.tokens

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As transformers' models are called; token types are passed over where the model has none."""
        typed = self.model.config.embedding.type_vocab_size > 0
        wanted = {name: options.get(name) or False for name in ("output_attentions", "output_hidden_states")}
        result = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, labels=labels,
            token_type_ids=token_type_ids if typed else None, **wanted, **self._others(options),
        )  # fmt: skip
        return self._output(result)

    def _others(self, options: dict[str, Any]) -> dict[str, Any]:
        """What more a task's model is called with."""
        return {}

    def _output(self, result: Any) -> Any:
        return outputs.BaseModelOutputWithPooling(
            last_hidden_state=result.last_hidden_state, pooler_output=result.logits,
            hidden_states=result.hidden_states, attentions=result.attentions,
        )  # fmt: skip


class PolyformerForMaskedLM(PolyformerModel):
    """Guesses hidden tokens."""

    head = "masked"
    result: ClassVar[Any] = outputs.MaskedLMOutput

    def _output(self, result: Any) -> Any:
        return self.result(
            loss=result.loss, logits=result.logits, hidden_states=result.hidden_states,
            attentions=result.attentions,
        )  # fmt: skip


class PolyformerForSequenceClassification(PolyformerForMaskedLM):
    """A label for a text."""

    head = "classify"
    result = outputs.SequenceClassifierOutput


class PolyformerForTokenClassification(PolyformerForMaskedLM):
    """A label for every token."""

    head = "tag"
    result = outputs.TokenClassifierOutput


class PolyformerForQuestionAnswering(PolyformerModel):
    """Where an answer starts and ends."""

    head = "span"

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                token_type_ids: Tensor | None = None, position_ids: Tensor | None = None,
                start_positions: Tensor | None = None, end_positions: Tensor | None = None,
                **options: Any) -> Any:  # fmt: skip
        """The labels are two."""
        labels = None
        if start_positions is not None and end_positions is not None:
            labels = torch.stack([start_positions, end_positions], -1)
        return super().forward(input_ids, attention_mask, token_type_ids, position_ids, labels, **options)

    def _output(self, result: Any) -> Any:
        start, end = result.logits.unbind(-1)
        return outputs.QuestionAnsweringModelOutput(
            loss=result.loss, start_logits=start, end_logits=end, hidden_states=result.hidden_states,
            attentions=result.attentions,
        )  # fmt: skip


class PolyformerForCausalLM(PolyformerForMaskedLM):
    """Continues texts; `generate` is ours, with transformers' settings."""

    head = "language_model"
    result = outputs.CausalLMOutput

    def can_generate(self) -> bool:
        return True

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, attention_mask: Tensor | None = None,
                 generation_config: Any = None, **options: Any) -> Tensor:  # fmt: skip
        """The token ids [N, T]: see `polyformer.generation.generate`; settings as in transformers."""
        ids = options.pop("input_ids", inputs)
        chosen = generation_config or self.generation_config
        given = {**(chosen.to_dict() if chosen is not None else {}), **options}
        settings = {name: value for name, value in given.items() if value is not None}
        return self.model.generate(ids, attention_mask, from_hub(settings)).sequences


class PolyformerForSeq2SeqLM(PolyformerForCausalLM):
    """Makes one text of another."""

    result = outputs.Seq2SeqLMOutput

    def _others(self, options: dict[str, Any]) -> dict[str, Any]:
        names = ("decoder_input_ids", "decoder_attention_mask")
        return {name: options[name] for name in names if options.get(name) is not None}

    def _output(self, result: Any) -> Any:
        return outputs.Seq2SeqLMOutput(
            loss=result.loss, logits=result.logits, decoder_hidden_states=result.hidden_states,
            decoder_attentions=result.attentions, cross_attentions=result.cross_attentions,
            encoder_last_hidden_state=result.encoder_last_hidden_state,
        )  # fmt: skip


AUTO = {
    transformers.AutoModel: PolyformerModel,
    transformers.AutoModelForMaskedLM: PolyformerForMaskedLM,
    transformers.AutoModelForCausalLM: PolyformerForCausalLM,
    transformers.AutoModelForSeq2SeqLM: PolyformerForSeq2SeqLM,
    transformers.AutoModelForSequenceClassification: PolyformerForSequenceClassification,
    transformers.AutoModelForTokenClassification: PolyformerForTokenClassification,
    transformers.AutoModelForQuestionAnswering: PolyformerForQuestionAnswering,
}


def wrap(model: Transformer) -> PolyformerModel:
    """`model` as one of transformers' models; the weights are its own, not copied.

    Raises `InputError` for a head that transformers has no class for.
    """
    for wrapper in AUTO.values():
        both = model.encoder is not None and model.decoder is not None
        if wrapper.head == model.config.head.kind and both == (wrapper is PolyformerForSeq2SeqLM):
            with torch.device("meta"):
                made = wrapper(PolyformerConfig(polyformer=model.config.to_dict()))
            made.model = model
            return made.train(model.training)
    kinds = sorted({wrapper.head for wrapper in AUTO.values()})
    raise InputError(f"head: expected one of {kinds}, for which transformers has a class, "
                     f"got {model.config.head.kind!r}")  # fmt: skip


transformers.AutoConfig.register("polyformer", PolyformerConfig)
for auto, wrapper in AUTO.items():
    auto.register(PolyformerConfig, wrapper)
