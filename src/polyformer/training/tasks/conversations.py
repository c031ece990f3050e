"""Tasks of conversations: instruction tuning and direct preference optimization.

A conversation is rendered by the chat template of the model, and the tokens of the assistant are learned
(`polyformer.data.rows.packing`). Before training an example is shown.

**sft**: continue conversations; only what the assistant says counts.

    loss = -1/N sum over conversations and learned tokens t of log P(x_t | x_<t)

N is the number of the learned tokens in the step, so a long reply counts more than a short reply. Several
conversations share a row and do not attend to each other; the loss of a row is that of its conversations
alone, weighted by their learned tokens.

**dpo**: replies that are preferred become more probable than those that are not.

    loss = -log sigmoid( beta (log pi(y_w|x) / ref(y_w|x) - log pi(y_l|x) / ref(y_l|x)) )

pi is the model, ref the model before training, frozen; y_w is the chosen and y_l the rejected reply to the
conversation x, and log pi(y|x) is a sum over the tokens of y, with the end of its turn. With an adapter
(`polyformer.training.tuning`) ref is the same model without the adapter, which needs no second copy. Both
conversations of a pair are one row, as separate documents, so that a pass computes both. Rafailov et al. 2023
(DPO), equation 7.
"""

import abc
import copy
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.files import read_bounded
from polyformer.core.host_values import IGNORED, next_labels
from polyformer.core.ranges import PositiveFloat
from polyformer.data import Tokenizer
from polyformer.data.chat import ChatTemplate
from polyformer.data.formats.chats import CONVERSATION, PREFERENCE
from polyformer.data.rows import Batch, Row
from polyformer.data.rows.packing import Marked, learned_tokens, marked_row, pack_whole
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import start_from
from polyformer.models.checkpoints.adapters import base_of, is_adapted
from polyformer.nn.heads import LanguageModelConfig
from polyformer.training.objectives import preference_loss, preference_margins
from polyformer.training.tasks.base import Metrics, ModelLoss, Rows, TrainingBatches
from polyformer.training.tasks.text import (
    Continuation,
    NextTokens,
    Perplexity,
    TextArchitecture,
    TextRows,
    TextTask,
    TextTaskConfig,
    stacked,
)
from polyformer.training.tuning import has_adapter, without_adapter

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceTuningConfig(ChatConfig):
    """Direct preference optimization (DPO): prefer the chosen of two replies."""

    max_length: int = 1024  # tokens of a conversation with its reply
    beta: PositiveFloat = 0.1  # how strongly the model is held to the reference

    needs: ClassVar[tuple[str, ...]] = PREFERENCE
    text_columns: ClassVar[tuple[str, ...]] = PREFERENCE
    length_option: ClassVar[str] = "max_length"
    kind: ClassVar[str] = "dpo"
    paper: ClassVar[str] = "Rafailov et al. 2023 (DPO), equation 7"

    @property
    def longest_row(self) -> tuple[str, int]:
        """Return the length of a pair."""
        return "twice max_length", 2 * self.max_length


class PreferredReplies(ChatRows):
    """Rows of a conversation with the chosen reply and the same with the rejected, as documents 0 and 1."""

    config: PreferenceTuningConfig

    def example(self, row: Row) -> Marked:
        """Return the conversation with the chosen reply."""
        return self.marked(row, PREFERENCE[0], 1, last_only=True)

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the pairs; raise `InputError` for a reply without a token after the first."""
        pairs = []
        for number, row in enumerate(rows, 1):
            pair = [self.marked(row, role, number, last_only=True) for role in PREFERENCE]
            for role, (_, learned) in zip(PREFERENCE, pair):
                if not any(learned[1:]):
                    raise InputError(f"{role} {number}: the reply has no token; leave the pair out")
            pairs.append(marked_row(pair))
        return pairs


@dataclasses.dataclass(frozen=True, eq=False)
class PreferenceOutput:
    """The mean loss of the pairs, and beta log pi / ref of the chosen and the rejected replies, [B] each."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor


class PolicyAndReference(nn.Module):
    """The trained model and its frozen reference as one module for the training loop.

    reference: None for a `model` with an adapter, which is left out for the reference.
    """

    def __init__(self, model: Transformer, reference: Transformer | None, beta: float):
        super().__init__()
        self.model, self.beta = model, beta
        self.reference = None if reference is None else reference.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model; the reference computes without dropout."""
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def forward(self, labels: Tensor, **batch: Tensor) -> PreferenceOutput:
        """Return the loss of pairs: rows of documents 0 and 1, with labels [B, T] at the replies' tokens."""
        reference = self.reference_sums(labels, batch)
        policy = reply_sums(self.model, labels, batch)
        chosen, rejected = (self.beta * (policy - reference)).unbind(-1)
        margins = preference_margins(policy.unbind(-1), reference.unbind(-1), self.beta)
        return PreferenceOutput(preference_loss(margins), chosen, rejected)

    @torch.no_grad()
    def reference_sums(self, labels: Tensor, batch: Batch) -> Tensor:
        """Return log ref of both replies of each row, [B, 2]."""
        if self.reference is not None:
            return reply_sums(self.reference, labels, batch)
        mode = self.model.training
        self.model.eval()
        with without_adapter(self.model):
            sums = reply_sums(self.model, labels, batch)
        self.model.train(mode)
        return sums


def reply_sums(model: Transformer, labels: Tensor, batch: Batch) -> Tensor:
    """Return log P of the labelled tokens of documents 0 and 1 of each row, [B, 2], float32 or more."""
    documents = batch["document_ids"]
    following = next_labels(labels, documents)
    row, place = (following != IGNORED).nonzero(as_tuple=True)
    # With labels a model computes logits only when asked, and here only where they are needed.
    output = model(**batch, labels=torch.full_like(labels, IGNORED))
    hidden = output.last_hidden_state[row, place, None]
    logits = model.next_logits(dataclasses.replace(output, last_hidden_state=hidden))
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    values = log_p.gather(-1, following[row, place, None]).squeeze(-1)
    sums = values.new_zeros(2 * len(labels)).index_add(0, 2 * row + documents[row, place], values)
    return sums.view(-1, 2)


REFERENCE = "reference"
"""The subfolder of the reference in the folder of a run without an adapter."""


class Preferences(ModelLoss):
    """The loss of `PolicyAndReference`, a mean over pairs."""

    plain = False

    def __init__(self, config: PreferenceTuningConfig):
        self.config = config

    def weight(self, batch: Batch) -> int:
        """Return the number of pairs."""
        return len(batch["input_ids"])

    def training_module(self, model: Transformer, run: Path | None = None) -> PolicyAndReference:
        """Return the model with its reference: itself as it is now, or as the folder `run` has it."""
        reference: Any = None
        if run is not None and is_adapted(run):
            reference = base_of(run, start_from)
        elif run is not None:
            reference = Transformer.from_pretrained(run / REFERENCE)
        elif not has_adapter(model):
            reference = copy.deepcopy(model)
        if reference is not None:
            reference = reference.to(next(model.parameters()).device)
        return PolicyAndReference(model, reference, self.config.beta).train(model.training)

    def auxiliary_models(self, module: nn.Module) -> dict[str, Transformer]:
        """Return the reference, unless it is the model without its adapter."""
        assert isinstance(module, PolicyAndReference)
        return {} if module.reference is None else {REFERENCE: module.reference}


class RewardMargins(Metrics):
    """The metrics of pairs; a reward is beta log pi / ref of a reply.

    loss: nats per pair. margin: mean reward of the chosen minus the rejected reply. accuracy: share of pairs
    with a positive margin. chosen, rejected: mean rewards.
    """

    sums = 5

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return sums of loss, chosen and rejected rewards and positive margins, and the number of pairs."""
        output = model(**batch)
        count, positive = len(output.chosen), (output.chosen > output.rejected).sum()
        rewards = output.chosen.double().sum(), output.rejected.double().sum()
        return stacked(output.loss.double() * count, *rewards, positive, count, device=output.chosen.device)

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        *sums, count = totals
        loss, chosen, rejected, accuracy = (value / max(count, 1) for value in sums)
        margin = chosen - rejected
        return {
            "loss": loss,
            "margin": margin,
            "accuracy": accuracy,
            "chosen": chosen,
            "rejected": rejected,
        }


class PreferenceTuning(ChatTask, config=PreferenceTuningConfig):
    """Direct preference optimization, measured by `RewardMargins`."""

    config: PreferenceTuningConfig
    rows: PreferredReplies

    def __init__(self, config: PreferenceTuningConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=PreferredReplies(config, tokenizer),
            architecture=TextArchitecture(
                "decoder", LanguageModelConfig(), tokenizer, config.max_length, packs_documents=True
            ),
            objective=Preferences(config),
            metrics=RewardMargins(),
        )
