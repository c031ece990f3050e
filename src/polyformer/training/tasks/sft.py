"""Instruction tuning: continue conversations; only what the assistant says counts.

    loss = -1/N sum over conversations and learned tokens t of log P(x_t | x_<t)

A conversation is rendered by the chat template of the model, and the tokens of the assistant are learned
(`polyformer.data.chat.learned`). N is the number of these tokens in the step, so a long reply counts more
than a short reply. Several conversations share a row and do not attend to each other; the loss of a row is
that of its conversations alone, weighted by their learned tokens.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from polyformer.core.errors import InputError
from polyformer.core.files import read_bounded
from polyformer.data import Tokenizer
from polyformer.data.chat.learned import learned_tokens
from polyformer.data.chat.template import ChatTemplate
from polyformer.data.formats.chats import CONVERSATION
from polyformer.data.rows.batching import Row
from polyformer.data.rows.whole_documents import Marked, pack_whole
from polyformer.nn.heads import LanguageModelConfig
from polyformer.training.tasks.base import Rows
from polyformer.training.tasks.lm import Continuation, NextTokens
from polyformer.training.tasks.text import (
    Perplexity,
    TextArchitecture,
    TextRows,
    TextTask,
    TextTaskConfig,
)

TEMPLATE_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig(TextTaskConfig):
    """Options of tasks that read conversations by a chat template."""

    too_long: Literal["refuse", "truncate"] = "refuse"  # truncate: the last tokens of a conversation are kept
    template: str | None = None  # a Jinja file or its text; None: the template of the model's tokenizer

    def resolve(self, rows: Rows) -> Self:
        """Return this with the text of the template instead of its file, which may be moved."""
        if self.template is None or "{" in self.template:
            return self
        text = read_bounded(Path(self.template), TEMPLATE_BYTES).decode("utf-8", "replace")
        return dataclasses.replace(self, template=text)

    def texts(self, rows: Rows) -> Iterator[str]:
        """Return what is said in the conversations."""
        for row in rows:
            for column in self.text_columns:
                for message in json.loads(row[column])["messages"]:
                    if isinstance(message.get("content"), str):
                        yield message["content"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstructionTuningConfig(ChatConfig):
    """Instruction tuning: continue conversations; only the assistant's tokens count."""

    row_length: int = 1024  # most tokens of a conversation, and of a row of several

    needs: ClassVar[tuple[str, ...]] = (CONVERSATION,)
    text_columns: ClassVar[tuple[str, ...]] = (CONVERSATION,)
    kind: ClassVar[str] = "sft"


class ChatRows(TextRows):
    """Rows of conversations as the tokenizer's chat template renders them.

    Raises `InputError` for a tokenizer without a template, unless the task names it.
    """

    config: ChatConfig

    def __init__(self, config: ChatConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if config.template is not None:
            tokens = {f"{role}_token": token for role, token in tokenizer.roles.items() if token}
            tokenizer.chat = ChatTemplate({"default": config.template}, tokens)
        if tokenizer.chat is None:
            raise InputError(
                "tokenizer: it has no chat template, by which conversations become tokens; start from a chat "
                "model with --pretrained MODEL, or name a template with --task.template FILE"
            )

    @property
    def limit(self) -> int:
        """Return the most tokens of a conversation."""
        return getattr(self.config, self.config.length_option)

    def marked(self, row: Row, column: str, number: int, *, last_only: bool = False) -> Marked:
        """Return the ids of a conversation, and which are learned; the last tokens of a longer one.

        number: of the row, from 1, for errors. Raises `InputError` for a longer conversation unless the task
        truncates, and for a conversation that the template refuses.
        """
        try:
            ids, learned = learned_tokens(self.tokenizer, json.loads(row[column]), last_only=last_only)
        except InputError as error:
            raise InputError(f"{column} {number}: {error}") from error
        if len(ids) > self.limit and self.config.too_long == "refuse":
            raise InputError(
                f"{column} {number} has {len(ids)} tokens, more than task.{self.config.length_option} "
                f"{self.limit}; raise it, or set task.too_long to 'truncate', which keeps the last tokens"
            )
        return ids[-self.limit :], learned[-self.limit :]

    def note_example(self, marked: Marked) -> None:
        """Note a conversation with marks around the learned tokens, if there is none yet."""
        if not any(note.startswith(EXAMPLE) for note in self.notes):
            self.notes.append(f"{EXAMPLE}:\n{shown(self.tokenizer, marked)}")


class Conversations(ChatRows):
    """Rows of whole conversations, packed, with labels at the assistant's tokens."""

    config: InstructionTuningConfig

    def conversations(self, rows: Sequence[Row]) -> list[Marked]:
        """Return the conversations; raise `InputError` if nothing is learned from any."""
        marked = [self.marked(row, CONVERSATION, number) for number, row in enumerate(rows, 1)]
        # The first token of a conversation has no token before it that could predict it.
        useful = [(ids, learned) for ids, learned in marked if any(learned[1:])]
        if rows and not useful:
            raise InputError(f"{CONVERSATION}: no token of the assistant in any of {len(rows)}; add replies")
        return useful

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return packed rows, and note an example and the numbers of conversations and tokens."""
        marked = self.conversations(rows)
        self.note_example(marked[0])
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


EXAMPLE = "the first conversation, what is learned between ⟦ and ⟧"
SHOWN = 1200
"""The most characters of an example."""


def shown(tokenizer: Tokenizer, marked: Marked) -> str:
    """Return a conversation with its special tokens, in which the learned tokens are between marks."""
    pieces, start = [], 0
    ids, learned = marked
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or learned[stop] != learned[start]:
            text = tokenizer.decode(ids[start:stop], keep_special=True)
            pieces.append(f"⟦{text}⟧" if learned[start] else text)
            start = stop
    text = "".join(pieces)
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]} ... {text[-half:]}"


class ChatTask(TextTask, Continuation):
    """A task whose model replies in conversations."""

    config: Any
    command = "generate"

    def start(self, prompt: str) -> list[int]:
        """Return the token ids of a text that starts with `prompt`, as the model's tokenizer marks it."""
        return self.tokenizer.encode_prompt(prompt)


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
