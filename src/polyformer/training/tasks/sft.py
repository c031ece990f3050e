"""Instruction tuning: continue conversations; only what the assistant says counts.

    loss = -1/N sum over conversations and learned tokens t of log P(x_t | x_<t)

A conversation is rendered by the chat template of the model, and the tokens of the assistant are learned
(`polyformer.data.rows.packing`). N is the number of these tokens in the step, so a long reply counts more
than a short reply. Several conversations share a row and do not attend to each other; the loss of a row is
that of its conversations alone, weighted by their learned tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from polyformer.core.errors import InputError
from polyformer.data import Tokenizer
from polyformer.data.formats.chats import CONVERSATION
from polyformer.data.rows.batching import Row
from polyformer.data.rows.packing import Marked, pack_whole
from polyformer.nn.heads import LanguageModelConfig
from polyformer.training.tasks.continuing import NextTokens
from polyformer.training.tasks.conversations import ChatConfig, ChatRows, ChatTask
from polyformer.training.tasks.text import Perplexity, TextArchitecture


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstructionTuningConfig(ChatConfig):
    """Instruction tuning: continue conversations; only the assistant's tokens count."""

    row_length: int = 1024  # most tokens of a conversation, and of a row of several

    needs: ClassVar[tuple[str, ...]] = (CONVERSATION,)
    text_columns: ClassVar[tuple[str, ...]] = (CONVERSATION,)
    kind: ClassVar[str] = "sft"


class Conversations(ChatRows):
    """Rows of whole conversations, packed, with labels at the assistant's tokens."""

    config: InstructionTuningConfig

    def example(self, row: Row) -> Marked:
        """Return the conversation of a row."""
        return self.marked(row, CONVERSATION, 1)

    def conversations(self, rows: Sequence[Row]) -> list[Marked]:
        """Return the conversations; raise `InputError` if nothing is learned from any."""
        marked = [self.marked(row, CONVERSATION, number) for number, row in enumerate(rows, 1)]
        # The first token of a conversation has no token before it that could predict it.
        useful = [(ids, learned) for ids, learned in marked if any(learned[1:])]
        if rows and not useful:
            raise InputError(f"{CONVERSATION}: no token of the assistant in any of {len(rows)}; add replies")
        return useful

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return packed rows, and note the numbers of conversations and tokens."""
        marked = self.conversations(rows)
        packed = list(pack_whole(marked, self.limit))
        learned, total = sum(sum(marks) for _, marks in marked), sum(len(ids) for ids, _ in marked)
        self.notes.append(
            f"{len(marked)} conversations in {len(packed)} rows; {learned:,} of {total:,} tokens are learned"
        )
        if len(marked) < len(rows):
            self.notes.append(f"{len(rows) - len(marked)} conversations without a learned token are left out")
        return packed

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return packed rows."""
        return list(pack_whole(self.conversations(rows), self.limit))


class InstructionTuning(ChatTask, config=InstructionTuningConfig):
    """Instruction tuning, measured by loss (nats per learned token) and perplexity."""

    config: InstructionTuningConfig
    rows: Conversations

    def __init__(self, config: InstructionTuningConfig, tokenizer: Tokenizer):
        objective = NextTokens()
        super().__init__(
            config,
            tokenizer,
            rows=Conversations(config, tokenizer),
            architecture=TextArchitecture(
                "decoder", LanguageModelConfig(), tokenizer, config.row_length, packs_documents=True
            ),
            objective=objective,
            metrics=Perplexity(objective.weight),
        )
