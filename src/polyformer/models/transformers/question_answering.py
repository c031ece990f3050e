"""Wrapped models for question answering, which compute padding in the same way as transformers.

transformers counts padded positions among the possible starts and ends of an answer, so its loss and
gradients depend on the model's outputs at padding. The wrapper therefore computes padding too
(`Transformer.unpads`), and leaves it at the same positions as transformers. docs/design/models.md lists the
remaining differences.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import modeling_outputs as outputs

from polyformer.attention.positions.added import Learned
from polyformer.models.outputs import ModelOutput
from polyformer.models.transformers.base import PolyformerModel
from polyformer.models.transformers.inputs import OFFSET, Arguments, accepts_text

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
