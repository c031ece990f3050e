"""Wrapped models that find answers, whose padding is computed as transformers computes it.

transformers counts padded places among those an answer may start or end at, so its loss and gradients depend
on what a model makes of padding. Here too, then, padding is computed (`Transformer.unpads`), and stands where
it stands there. What stays different is said in docs/design.md.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import modeling_outputs as outputs

from polyformer.hub.base import PolyformerModel
from polyformer.hub.inputs import ASKED, MORE_TEXT, OFFSET, SOURCE, STATE, TEXT, Arguments, taking
from polyformer.outputs import ModelOutput
from polyformer.position.learned import Learned

ZEROED = ("xlm",)
"""Families whose hidden states at padding are 0."""

BLIND = ("longformer",)
"""Families whose padded tokens attend to nothing."""

LEARN_PADDING = ("gpt2", "gptj", "gpt_neo", "t5")
"""Families whose padding token's vector has gradients, as any other's."""


class PolyformerForQuestionAnswering(PolyformerModel):
    """Where an answer starts and ends; a place outside the text counts for nothing, as in transformers."""

    result = outputs.QuestionAnsweringModelOutput
    both_result = outputs.Seq2SeqQuestionAnsweringModelOutput

    @taking(*TEXT, "start_positions", "end_positions", *MORE_TEXT, *SOURCE, *STATE, *ASKED)
    def forward(self, arguments: Arguments) -> Any:
        """As transformers' models of this task are called, with their results."""
        places = [arguments.pop(name, None) for name in ("start_positions", "end_positions")]
        if all(position is not None for position in places):
            arguments["answers"] = places
            arguments.setdefault("use_cache", False)
        arguments.pop("num_items_in_batch", None)  # theirs too takes the mean of every part of a batch
        return self._answered(arguments)

    def _call(self, arguments: Arguments) -> tuple[ModelOutput, Arguments]:
        answers = arguments.pop("answers", None)
        self.model.unpads = False
        mask = arguments.get("attention_mask")
        self._settle_question(arguments)
        origin = self.model.config.origin
        family = "" if origin is None else origin.model_type
        if family:
            self._settle_padding(arguments, family)
        result = self.model(**arguments)
        hidden = result.last_hidden_state
        if family in ZEROED and mask is not None:
            hidden = hidden.masked_fill(mask.unsqueeze(-1) == 0, 0.0)
        start, end = self.model.head.logits(hidden, arguments.get("input_ids")).unbind(-1)
        if answers is not None:
            loss = (_loss(start, answers[0]) + _loss(end, answers[1])) / 2
            result = dataclasses.replace(result, loss=loss)
        return result, {"start_logits": start, "end_logits": end}

    def _settle_question(self, arguments: Arguments) -> None:
        """Token types where the head knows the question's end and none are there: 1 behind it."""
        end, ids = getattr(self.model.config.head, "question_end", None), arguments.get("input_ids")
        if end is None or ids is None or "token_type_ids" in arguments:
            return
        ends = ids == end
        question = (ends.cumsum(1) - ends.long() == 0) & ends.any(1, keepdim=True)
        question[:, 0] = True
        arguments["token_type_ids"] = (~question).long()

    def _settle_padding(self, arguments: Arguments, family: str) -> None:
        """Positions and what padding sees, as in transformers' `family`."""
        ids, mask, pad = arguments.get("input_ids"), arguments.get("attention_mask"), self.config.pad_token_id
        if pad is not None and family not in LEARN_PADDING:
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
            if int(edges.max()) == 1:  # padding as a document of its own, whose keys are not valid either
                arguments["document_ids"] = edges

    def _behind_padding(self, arguments: Arguments, real: Tensor) -> None:
        """Positions of `real` tokens [B, T], counted from 0, and -1 at padding: the row before all, which
        learns nothing. Left to the model where a mask does not say what the ids say."""
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
    """Of logits [B, T], padding's too; the mean over the places [B] or [B, 1] that are in the text."""
    length = logits.shape[1]
    goals = places.flatten().clamp(0, length).to(logits.device)
    return F.cross_entropy(logits, goals, ignore_index=length)
