"""ETC's pre-training: guess hidden tokens, and tell by its context which sentence is hidden.

    loss = (1 - w) * masked language modelling + w * contrastive        w = contrastive_weight

Both come from one pass over rows of a document and of its hidden sentences alone, see
`polyformer.objectives.contrastive`; tokens to guess are among those of the other sentences. Documents are cut
behind sentences, into as many global tokens and long tokens as a row has. Ainslie et al. 2020, section 3.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.attention import SoftmaxConfig
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, mask_tokens
from polyformer.data.batching import Batch, Corrupt, Row
from polyformer.data.structured import documents_of, split_sentences, structured
from polyformer.heads import HeadConfig, MaskedConfig
from polyformer.objectives.contrastive import contrastive_loss, hide_sentences, pairs_of
from polyformer.patterns import ETC
from polyformer.position import EtcLabelsConfig
from polyformer.tasks.base import Rows, TaskConfig, TextTask, check_room, exp, required
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveModellingConfig(TaskConfig):
    """Guess hidden tokens and find hidden sentences; for models with the pattern `ETC`."""

    row_length: int = 256  # long tokens in a row; its global tokens and hidden sentences come to them
    global_tokens: int = 32  # sentences in a row; the model's own number becomes this
    mask_share: float = 0.15  # of the tokens of visible sentences, how many are to be guessed
    sentence_share: float = 0.15  # of the sentences, how many are hidden whole
    contrastive_weight: float = 0.2
    temperature: float = 1.0

    needs: ClassVar[tuple[str, ...]] = ("text",)
    kind: ClassVar[str] = "cpc"
    paper: ClassVar[str] = "Ainslie et al. 2020 (ETC), section 3"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, row_length=self.row_length)
        at_least(2, global_tokens=self.global_tokens)
        for name in ("mask_share", "sentence_share", "contrastive_weight"):
            if not 0 < getattr(self, name) < 1:
                raise InputError(f"{name}: expected a share in (0, 1), got {getattr(self, name)}")
        if not self.temperature > 0:
            raise InputError(f"temperature: expected a number above 0, got {self.temperature}")
        check_room(self.batch_tokens, "row_length + global_tokens", self.row_length + self.global_tokens)

    def texts(self, rows: Rows) -> Iterator[str]:
        return (row["text"] for row in rows)

    def build(self, tokenizer: Tokenizer) -> "ContrastiveModelling":
        return ContrastiveModelling(self, tokenizer)


class ContrastiveModelling(TextTask):
    """Metrics: those of masked language modelling, and contrastive_loss (nats a hidden sentence) and
    contrastive_accuracy, which both hang on how many sentences a batch hides; `loss` is what is trained.
    """

    stacks = "encoder"
    sums = 6
    head: HeadConfig = MaskedConfig()

    def __init__(self, config: ContrastiveModellingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.config = config
        self.cls, self.mask = required(tokenizer.cls_id, "<cls>"), required(tokenizer.mask_id, "<mask>")

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        limits = {"global_tokens": self.config.global_tokens, "long_tokens": self.config.row_length}
        found: list[Row] = []
        for row in rows:
            sentences = self.tokenizer.encode_batch(split_sentences(row["text"]))
            found += [self._structured(one) for one in documents_of(sentences, **limits)]
        return found

    def _structured(self, sentences: Sequence[Sequence[int]]) -> Row:
        return structured(sentences, global_id=self.cls, global_tokens=self.config.global_tokens)

    @property
    def corrupt(self) -> Corrupt:
        return self._hide

    @property
    def corrupt_held_out(self) -> Corrupt:
        return self._hide

    def _hide(self, row: Row, generator: np.random.Generator) -> Row:
        is_long = row["token_type_ids"] == 1
        ids, numbers = row["input_ids"][is_long], row["segment_ids"][is_long]
        sentences = [ids[numbers == number] for number in range(numbers[-1] + 1)]
        hidden = hide_sentences(
            sentences,
            generator,
            mask_id=self.mask,
            global_id=self.cls,
            global_tokens=self.config.global_tokens,
            share=self.config.sentence_share,
        )
        chosen = hidden["segment_ids"][(hidden["pair_ids"] > 0) & (hidden["document_ids"] == 0)]
        visible = (hidden["token_type_ids"] == 1) & (hidden["document_ids"] == 0)
        visible &= ~np.isin(hidden["segment_ids"], chosen)
        hidden["labels"] = np.full_like(hidden["input_ids"], -100)
        hidden["input_ids"][visible], hidden["labels"][visible] = mask_tokens(
            hidden["input_ids"][visible],
            generator,
            mask_id=self.mask,
            ordinary_ids=self.tokenizer.ordinary_ids,
            share=self.config.mask_share,
        )
        return hidden

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """The model with this task's number of global tokens in its pattern and its labels."""
        config = super().adapt(config)
        assert config.encoder is not None
        attention = config.encoder.attention
        mechanism, position = attention.mechanism, config.encoder.position
        if not isinstance(mechanism, SoftmaxConfig) or not isinstance(mechanism.pattern, ETC):
            raise InputError("model: this task needs the pattern ETC; use etc-base, or attention=ETC(...)")
        count = {"global_tokens": self.config.global_tokens}
        mechanism = dataclasses.replace(mechanism, pattern=dataclasses.replace(mechanism.pattern, **count))
        if isinstance(position, EtcLabelsConfig):
            position = dataclasses.replace(position, **count)
        attention = dataclasses.replace(attention, mechanism=mechanism)
        encoder = dataclasses.replace(config.encoder, attention=attention, position=position)
        return dataclasses.replace(config, encoder=encoder)

    @property
    def positions(self) -> int:
        return self.config.global_tokens + self.config.row_length

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        guessing, predicted, encoded = self._run(model, batch)
        weight = self.config.contrastive_weight
        return (1 - weight) * guessing.loss + weight * self._contrastive(predicted, encoded)

    def _run(self, model: nn.Module, batch: Batch):
        output = model(**{name: one for name, one in batch.items() if name != "pair_ids"})
        return output, *pairs_of(output.last_hidden_state, batch["pair_ids"])

    def _contrastive(self, predicted: Tensor, encoded: Tensor) -> Tensor:
        if not len(predicted):
            return predicted.sum()  # no pair, but a place in the graph
        return contrastive_loss(predicted, encoded, temperature=self.config.temperature)

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        output, predicted, encoded = self._run(model, batch)
        labels, tokens, pairs = batch["labels"], self.weight(batch), len(predicted)
        own = torch.arange(pairs, device=predicted.device)
        right = (output.logits.argmax(-1) == labels).sum()
        found = ((predicted @ encoded.T).argmax(-1) == own).sum() if pairs else own.sum()
        nats = output.loss.double() * tokens, self._contrastive(predicted, encoded).double() * pairs
        counts = [output.loss.new_tensor(one).double() for one in (tokens, pairs)]
        return torch.stack([nats[0], right.double(), counts[0], nats[1], found.double(), counts[1]])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        nats, right, tokens, contrast, found, pairs = totals
        guessing, telling = nats / max(tokens, 1), contrast / max(pairs, 1)
        weight = self.config.contrastive_weight
        return {
            "loss": (1 - weight) * guessing + weight * telling,
            "perplexity": exp(guessing),
            "accuracy": right / max(tokens, 1),
            "contrastive_loss": telling,
            "contrastive_accuracy": found / max(pairs, 1),
        }
