"""The classes of wrapped models: one for each kind of head, two of them with transformers' `generate`.

For question answering transformers counts padded positions among the possible starts and ends of an answer,
so its loss and gradients depend on the model's outputs at padding. The wrapper therefore computes padding too
(`Transformer.unpads`), and leaves it at the same positions. docs/design/models.md lists other differences.
"""

import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import modeling_outputs as outputs
from transformers.models.albert.modeling_albert import AlbertForPreTrainingOutput
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.models.decision_transformer.modeling_decision_transformer import DecisionTransformerOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2DoubleHeadsModelOutput
from transformers.models.openai.modeling_openai import OpenAIGPTDoubleHeadsModelOutput

from polyformer.attention.positions.added import Learned
from polyformer.core.errors import InputError
from polyformer.core.host_values import next_labels
from polyformer.models.architectures import TrajectoryConfig, TrajectoryTransformer
from polyformer.models.outputs import ModelOutput
from polyformer.models.transformers.base import OUTPUT_OPTIONS, PolyformerModel
from polyformer.models.transformers.cache import PolyformerCache, supports_kv_cache
from polyformer.models.transformers.inputs import (
    OFFSET,
    OTHER_TEXT_INPUTS,
    OUTPUT_ARGUMENTS,
    SOURCE,
    STATE,
    TEXT,
    Arguments,
    accepts,
    accepts_text,
)
from polyformer.models.transformers.saved_folder import PolyformerConfig, shared_weights_loaded
from polyformer.nn.heads.classification import mean_cross_entropy


class Labelled(PolyformerModel):
    """The base class of models with logits and `labels`."""

    result: ClassVar[Any] = outputs.MaskedLMOutput

    forward = accepts_text("labels", source=True)(PolyformerModel._run)

    def _call(self, arguments: Arguments) -> tuple[ModelOutput, Arguments]:
        return self._logits(arguments)


class PolyformerForMaskedLM(Labelled):
    """A model that predicts masked tokens; also an encoder that predicts every token (XLM)."""

    forward = accepts_text("labels", at_end=("logits_to_keep",))(PolyformerModel._run)


class PolyformerForSequenceClassification(Labelled):
    """A model that predicts a label for a text."""

    result = outputs.SequenceClassifierOutputWithPast
    both_result = outputs.Seq2SeqSequenceClassifierOutput

    def _call(self, arguments: Arguments) -> tuple[ModelOutput, Arguments]:
        labels, config = arguments.get("labels"), self.model.config
        count = config.head.num_labels
        soft = labels is not None and labels.is_floating_point() and labels.shape[1:] == (count,) != (1,)
        named = config.origin is not None and config.origin.model_type in SOFT
        if not (soft and named and config.head.problem is None):
            return self._logits(arguments)
        result = self.model(**{name: value for name, value in arguments.items() if name != "labels"})
        loss = -(result.logits.log_softmax(-1) * labels).sum(-1).mean()
        return dataclasses.replace(result, loss=loss), {"logits": result.logits}


# Families that interpret several labels as probabilities of one label, without a `problem_type`.
SOFT = ("deberta", "deberta-v2")


class PolyformerForTokenClassification(Labelled):
    """A model that predicts a label for every token."""

    result = outputs.TokenClassifierOutput


class PolyformerForMultipleChoice(Labelled):
    """A model that chooses among the texts [B, C, T] the answer to a question."""

    result = outputs.MultipleChoiceModelOutput

    def _of_choices(self, arguments: Arguments) -> Any:
        """Return the result of transformers' models for this task; the arguments are the same."""
        text = arguments.get("input_ids", arguments.get("inputs_embeds"))
        if text is None or text.dim() != (3 if "input_ids" in arguments else 4):
            raise InputError(
                "input_ids: expected [batch, choices, length], "
                f"got {None if text is None else tuple(text.shape)}"
            )
        arguments["shape"] = text.shape[:2]
        for name in (*TEXT, *OTHER_TEXT_INPUTS):
            if name in arguments and arguments[name].shape[:2] == text.shape[:2]:
                arguments[name] = arguments[name].flatten(0, 1)
        return self._run(arguments)

    forward = accepts_text("labels", state=False)(_of_choices)

    def _call(self, arguments: Arguments) -> tuple[ModelOutput, Arguments]:
        shape = arguments.pop("shape")
        rows = shape.numel()
        for name in (*TEXT, *OTHER_TEXT_INPUTS):
            if name in arguments and len(arguments[name]) == rows and arguments[name].dim() > 1:
                arguments[name] = arguments[name].unflatten(0, shape)
        return self._logits(arguments)


class PolyformerDoubleHeadsModel(PolyformerForMultipleChoice):
    """GPT's and GPT-2's two heads: a language model that also chooses among the texts [B, C, T].

    `mc_token_ids` [B, C] are our `score_positions`, by default the last real token of each text, where
    transformers takes the last token, even if it is padding. As in transformers, it returns the two losses
    separately.
    """

    @accepts_text("mc_token_ids", "labels", "mc_labels")
    def forward(self, arguments: Arguments) -> Any:
        """Return the result of transformers' models for this task; the arguments are the same."""
        if "mc_token_ids" in arguments:
            arguments["score_positions"] = arguments.pop("mc_token_ids")
        return self._of_choices(arguments)

    def _call(self, arguments: Arguments) -> tuple[ModelOutput, Arguments]:
        shape, answers = arguments["shape"], arguments.pop("mc_labels", None)
        result, predictions = super()._call(arguments)
        scores = result.sentence_logits
        assert scores is not None
        predictions["logits"] = predictions["logits"].unflatten(0, shape)
        predictions["mc_logits"] = scores
        if result.hidden_states is not None:  # transformers arranges only the last layer like the ids
            *before, last = result.hidden_states
            predictions["hidden_states"] = (*before, last.unflatten(0, shape))
        if answers is not None:
            predictions["mc_loss"] = mean_cross_entropy(scores, answers.flatten())
        return result, predictions

    def _result_class(self) -> Any:
        origin = self.model.config.origin
        first = origin is not None and origin.model_type == "openai-gpt"
        return OpenAIGPTDoubleHeadsModelOutput if first else GPT2DoubleHeadsModelOutput


class PolyformerForPreTraining(Labelled):
    """A pre-training model of tokens and a label of the whole text (BERT, ALBERT), or of replaced tokens
    (ELECTRA).

    `next_sentence_label` and `sentence_order_label` are two names of the text's label.
    """

    @accepts_text("labels", "next_sentence_label", "sentence_order_label", state=False)
    def forward(self, arguments: Arguments) -> Any:
        """Return the result of transformers' models for this task; the arguments are the same."""
        for name in ("next_sentence_label", "sentence_order_label"):
            if name in arguments:
                arguments["sentence_labels"] = arguments.pop(name).flatten()
        return self._run(arguments)

    def _call(self, arguments: Arguments) -> tuple[ModelOutput, Arguments]:
        result = self.model(**arguments)
        logits, sentence = result.logits, result.sentence_logits
        predictions = {"logits": logits, "prediction_logits": logits}
        return result, {**predictions, "seq_relationship_logits": sentence, "sop_logits": sentence}

    def _result_class(self) -> Any:
        origin = self.model.config.origin
        if not self.model.head.predicts_sentence:
            return outputs.TokenClassifierOutput
        ordered = origin is not None and origin.model_type == "albert"
        return AlbertForPreTrainingOutput if ordered else BertForPreTrainingOutput

    def _num_labelled(self, arguments: Arguments) -> Tensor:
        if "labels" not in arguments:
            return torch.tensor(len(arguments["sentence_labels"]))
        chosen = arguments["labels"] != -100
        if not self.model.head.predicts_sentence and arguments.get("attention_mask") is not None:
            chosen &= arguments["attention_mask"].bool()  # replaced tokens are counted among real tokens
        return chosen.sum()


# Families with zero hidden states at padding.
ZEROED = ("xlm",)

# Families in which padded tokens attend to no token.
BLIND = ("longformer",)

# Families in which the embedding of the padding token has gradients, like any other.
LEARN_PADDING = ("gpt2", "gptj", "gpt_neo", "t5")


class PolyformerForQuestionAnswering(PolyformerModel):
    """A question-answering model: start and end of the answer.

    A position outside the text does not count in the loss, as in transformers.
    """

    result = outputs.QuestionAnsweringModelOutput
    both_result = outputs.Seq2SeqQuestionAnsweringModelOutput

    @accepts_text("start_positions", "end_positions", source=True)
    def forward(self, arguments: Arguments) -> Any:
        """Return the result of transformers' models for this task; the arguments are the same."""
        places = [arguments.pop(name, None) for name in ("start_positions", "end_positions")]
        if all(position is not None for position in places):
            arguments["answers"] = places
            arguments.setdefault("use_cache", False)
        arguments.pop("num_items_in_batch", None)  # transformers also takes the mean per microbatch
        return self._run(arguments)

    def _call(self, arguments: Arguments) -> tuple[ModelOutput, Arguments]:
        answers = arguments.pop("answers", None)
        # Padding must be computed, see the module.
        self.model.unpads = False
        mask = arguments.get("attention_mask")
        self._resolve_question(arguments)
        origin = self.model.config.origin
        family = "" if origin is None else origin.model_type
        if family:
            self._resolve_padding(arguments, family)
        result = self.model(**arguments)
        hidden = result.last_hidden_state
        if family in ZEROED and mask is not None:
            hidden = hidden.masked_fill(mask.unsqueeze(-1) == 0, 0.0)
        start, end = self.model.head.logits(hidden, arguments.get("input_ids")).unbind(-1)
        if answers is not None:
            loss = (_loss(start, answers[0]) + _loss(end, answers[1])) / 2
            result = dataclasses.replace(result, loss=loss)
        return result, {"start_logits": start, "end_logits": end}

    def _resolve_question(self, arguments: Arguments) -> None:
        """Set token types if the head knows the question's end and none are given: 1 after the question."""
        end, ids = getattr(self.model.config.head, "question_end", None), arguments.get("input_ids")
        if end is None or ids is None or "token_type_ids" in arguments:
            return
        ends = ids == end
        question = (ends.cumsum(1) - ends.long() == 0) & ends.any(1, keepdim=True)
        question[:, 0] = True
        arguments["token_type_ids"] = (~question).long()

    def _resolve_padding(self, arguments: Arguments, family: str) -> None:
        """Set positions and the attention of padding as in transformers' `family`."""
        ids, mask, pad = arguments.get("input_ids"), arguments.get("attention_mask"), self.config.pad_token_id
        if pad is not None and family not in LEARN_PADDING:
            # Torch then gives this row no gradient, as in transformers.
            self.model.tokens.padding_idx = pad
        unwritten = not {"decoder_input_ids", "decoder_inputs_embeds"} & arguments.keys()
        if self.config.is_encoder_decoder and ids is not None and unwritten:
            arguments["decoder_input_ids"] = self.model.shifted_right(ids, None)
        text = arguments.get("inputs_embeds") if ids is None else ids
        if text is None:
            return
        rows, length = text.shape[:2]
        past = 0 if arguments.get("state") is None else arguments["state"].tokens.seen
        places = torch.arange(past, past + length, device=text.device).expand(rows, length)
        if "position_ids" not in arguments and (mask is not None or family in OFFSET):
            arguments["position_ids"] = places
            if family in OFFSET and ids is not None and pad is not None:
                self._behind_padding(arguments, ids != pad)
        if family in BLIND and mask is not None and "document_ids" not in arguments:
            edges = (mask.diff(dim=1, prepend=mask[:, :1]) != 0).cumsum(1)
            if int(edges.max()) == 1:  # padding is a separate document, and its keys are not valid either
                arguments["document_ids"] = edges

    def _behind_padding(self, arguments: Arguments, real: Tensor) -> None:
        """Set positions of `real` tokens [B, T], counted from 0, and -1 at padding: the row of the table
        before all others, which has no gradient. If the mask differs from the padding in the ids, the model
        sets the positions.
        """
        mask = arguments.get("attention_mask")
        if mask is None or bool((mask.bool() & ~real).any()):
            del arguments["position_ids"]
            return
        scheme = self.model.encoder.position
        if isinstance(scheme, Learned) and scheme.offset:
            table: Any = scheme.tables[0]
            table.padding_idx = scheme.offset - 1
        arguments["position_ids"] = real.cumsum(1).masked_fill(~real, 0) - 1


def _loss(logits: Tensor, places: Tensor) -> Tensor:
    """Return the mean loss of logits [B, T], with padding, at the positions [B] or [B, 1] in the text."""
    length = logits.shape[1]
    # Positions beyond the text become the ignored index.
    goals = places.flatten().clamp(0, length).to(logits.device)
    return F.cross_entropy(logits, goals, ignore_index=length)


class PolyformerDecisionTransformer(PolyformerModel):
    """A Decision Transformer, which reads returns, states and actions and predicts the next of each."""

    main_input_name = "states"

    def _build(self, config: PolyformerConfig) -> nn.Module:
        resolve = config.resolve()
        assert isinstance(resolve, TrajectoryConfig)
        return TrajectoryTransformer(resolve)

    def get_input_embeddings(self) -> nn.Module:
        """Raise `InputError`: there is no token table."""
        raise InputError("get_input_embeddings: a Decision Transformer has no tokens")

    @accepts(
        "states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask", *OUTPUT_ARGUMENTS
    )
    def forward(self, arguments: Arguments) -> Any:
        """Return the result of transformers' model; the same arguments, without use of `rewards`."""
        as_dict = arguments.pop("return_dict", self.config.return_dict)
        arguments.pop("rewards", None)
        for name in OUTPUT_OPTIONS:
            arguments[name] = bool(arguments.get(name, getattr(self.config, name, False)))
        with shared_weights_loaded(self.model):
            result = self.model(**arguments)
        output = DecisionTransformerOutput(
            state_preds=result.states,
            action_preds=result.actions,
            return_preds=result.returns,
            last_hidden_state=result.last_hidden_state,
            hidden_states=result.hidden_states,
            attentions=result.attentions,
        )
        return output if as_dict is not False else output.to_tuple()


PolyformerModel.for_trajectories = PolyformerDecisionTransformer


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
