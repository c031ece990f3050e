"""The pre-training of BERT and ALBERT: predict masked tokens and the relation of two segments.

    loss = masked language modelling + cross-entropy of the pair's label       both of <cls> A <sep> B <sep>

The label of `nsp` is whether B comes from another document, the label of `sop` whether the segments were
swapped; see `polyformer.data.rows.pairs`. Pairs are drawn once, `draws` times from every document, and
reused in every epoch; masked tokens are drawn according to `masking`. Devlin et al. 2019, section 3.1; Lan et
al. 2020, section 3.1.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeInt, PositiveInt, Share
from polyformer.data import MaskingConfig
from polyformer.data.rows.batching import Batch, Row
from polyformer.data.rows.pairs import Pair, next_sentence_pairs, pair_row, sentence_order_pairs
from polyformer.data.rows.structured import split_sentences
from polyformer.nn.heads import HeadConfig, PretrainingConfig
from polyformer.training.tasks.masking import MaskingTask
from polyformer.training.tasks.metrics import exp, stacked
from polyformer.training.tasks.text import TextTaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePairsConfig(TextTaskConfig):
    """Options of both kinds of pairs."""

    row_length: int = 128  # tokens of a pair, including <cls> and both <sep>
    short_share: Share = 0.1  # fraction of documents with shortened pairs
    draws: PositiveInt = 1  # number of draws of pairs from every document; 10 for BERT
    pair_seed: NonNegativeInt = 0  # seed of these draws
    masking: MaskingConfig = MaskingConfig()

    shortest: ClassVar[int] = 5
    make: ClassVar[Callable[..., Iterator[Pair]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextSentenceConfig(SentencePairsConfig):
    """BERT's pre-training: predict masked tokens, and whether the second segment follows the first."""

    kind: ClassVar[str] = "nsp"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1, task 2"
    make = staticmethod(next_sentence_pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceOrderConfig(SentencePairsConfig):
    """ALBERT's pre-training: predict masked tokens, and whether two segments were swapped."""

    masking: MaskingConfig = MaskingConfig(unit="word", longest=3)

    kind: ClassVar[str] = "sop"
    paper: ClassVar[str] = "Lan et al. 2020, section 3.1"
    make = staticmethod(sentence_order_pairs)


class SentencePairs(MaskingTask, config=SentencePairsConfig):
    """Sentence-pair pre-training, with metrics of masked tokens and of pairs.

    They are perplexity and accuracy of masked tokens, sentence_loss (nats per pair) and sentence_accuracy;
    loss is the training loss, the sum of both losses.
    """

    config: SentencePairsConfig
    sums, token_types = 6, 2
    head: HeadConfig = PretrainingConfig()

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return pairs, drawn `draws` times from every document."""
        return self.masking.copies(self._pairs(rows, self.config.draws))

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return pairs, drawn once."""
        return self._pairs(rows, 1)

    def _pairs(self, rows: Sequence[Row], draws: int) -> list[Row]:
        documents = [self._sentences(row["text"]) for row in rows]
        generator = np.random.default_rng(self.config.pair_seed)
        options = {"length": self.config.row_length - 3, "short_share": self.config.short_share}
        pairs = [pair for _ in range(draws) for pair in self.config.make(documents, generator, **options)]
        if not pairs:
            raise InputError("text: no document has two sentences; they end in . ! ? or an empty line")
        return [pair_row(pair, cls_id=self.cls, sep_id=self.sep) for pair in pairs]

    def _sentences(self, text: str) -> list[list[int]]:
        """Return the token ids of every sentence; all but the first keep the space before them."""
        spaced = [f" {sentence}" if i else sentence for i, sentence in enumerate(split_sentences(text))]
        return self.tokenizer.encode_batch(spaced)

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, correct predictions and number of masked tokens, then of pairs."""
        output, labels, pair_labels = model(**batch), batch["labels"], batch["sentence_labels"]
        logits, pair_logits = output.predictions()
        tokens, pairs = self.weight(batch), len(pair_labels)
        pair_nats = F.cross_entropy(pair_logits.double(), pair_labels, reduction="sum")
        return stacked(
            (output.loss.double() - pair_nats / pairs) * tokens,
            (logits.argmax(-1) == labels).sum(),
            tokens,
            pair_nats,
            (pair_logits.argmax(-1) == pair_labels).sum(),
            pairs,
            device=labels.device,
        )

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        nats, correct, tokens, pair_nats, correct_pairs, pairs = totals
        masked_loss, sentence_loss = nats / max(tokens, 1), pair_nats / max(pairs, 1)
        return {
            "loss": masked_loss + sentence_loss,
            "perplexity": exp(masked_loss),
            "accuracy": correct / max(tokens, 1),
            "sentence_loss": sentence_loss,
            "sentence_accuracy": correct_pairs / max(pairs, 1),
        }
