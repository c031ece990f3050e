"""Wrapped models for tasks without generation: one class for each kind of head."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import modeling_outputs as outputs
from transformers.models.albert.modeling_albert import AlbertForPreTrainingOutput
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2DoubleHeadsModelOutput
from transformers.models.openai.modeling_openai import OpenAIGPTDoubleHeadsModelOutput

from polyformer.core.errors import InputError
from polyformer.models.outputs import ModelOutput
from polyformer.models.transformers.base import PolyformerModel
from polyformer.models.transformers.inputs import OTHER_TEXT_INPUTS, TEXT, Arguments, accepts_text
from polyformer.nn.heads.problem_types import mean_cross_entropy


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
