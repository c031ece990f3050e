"""The parts that tasks of conversations share: rows by a chat template, and the note with an example."""

import abc
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from polyformer.core.errors import InputError
from polyformer.core.files import read_bounded
from polyformer.data import Tokenizer
from polyformer.data.chat import ChatTemplate
from polyformer.data.rows.batching import Row
from polyformer.data.rows.packing import Marked, learned_tokens
from polyformer.training.tasks.base import Rows, TrainingBatches
from polyformer.training.tasks.continuing import Continuation
from polyformer.training.tasks.text import TextRows, TextTask, TextTaskConfig

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
        """Return the texts of the conversations."""
        for row in rows:
            for column in self.text_columns:
                for message in json.loads(row[column])["messages"]:
                    if isinstance(message.get("content"), str):
                        yield message["content"]


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

    @abc.abstractmethod
    def example(self, row: Row) -> Marked:
        """Return the conversation of the first row, with its learned tokens."""

    def training_batches(self, rows: Any, seed: int) -> TrainingBatches:
        """Return batches of `rows`, and note the first conversation with marks around the learned tokens."""
        first = next(iter(rows), None)
        if first is not None:
            self.notes.append(f"{EXAMPLE}:\n{shown(self.tokenizer, self.example(first))}")
        return super().training_batches(rows, seed)


class ChatTask(TextTask, Continuation):
    """A task of replies in conversations."""

    config: Any
    command = "generate"

    def start(self, prompt: str) -> list[int]:
        """Return the token ids of a text that starts with `prompt`, as the model's tokenizer marks it."""
        return self.tokenizer.encode_prompt(prompt)
