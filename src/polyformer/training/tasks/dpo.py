"""Direct preference optimization: replies that are preferred become more probable than those that are not.

    loss = -log sigmoid( beta (log pi(y_w|x) / ref(y_w|x) - log pi(y_l|x) / ref(y_l|x)) )

pi is the model, ref the model before training, frozen; y_w is the chosen and y_l the rejected reply to the
conversation x, and log pi(y|x) is a sum over the tokens of y, with the end of its turn. With an adapter
(`polyformer.training.tuning`) ref is the same model without the adapter, which needs no second copy.
Rafailov et al. 2023 (DPO), equation 7.

Both conversations of a pair are one row, as separate documents, so that a pass computes both.
"""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED, next_labels
from polyformer.core.ranges import PositiveFloat
from polyformer.data import Tokenizer
from polyformer.data.formats.chats import PREFERENCE
from polyformer.data.rows.batching import Batch, Row
from polyformer.data.rows.packing import Marked, marked_row
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import start_from
from polyformer.models.checkpoints.adapters import base_of, is_adapted
from polyformer.nn.heads import LanguageModelConfig
from polyformer.training.objectives import preference_loss, preference_margins
from polyformer.training.tasks.base import Metrics, ModelLoss
from polyformer.training.tasks.conversations import ChatConfig, ChatRows, ChatTask
from polyformer.training.tasks.text import TextArchitecture, stacked
from polyformer.training.tuning import has_adapter, without_adapter


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
