"""Guess hidden tokens, and what two segments are to each other: the pre-training of BERT and of ALBERT.

    loss = masked language modelling + cross-entropy of the pair's label       both of <cls> A <sep> B <sep>

The label says of `nsp` whether B is from another document, of `sop` whether the two were swapped; see
`polyformer.data.sentence_pairs`. Pairs are drawn once, `draws` times from every document, and serve every
epoch; which tokens are hidden is drawn as `masking` says. Devlin et al. 2019, section 3.1; Lan et al. 2020,
section 3.1.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.core.errors import InputError
from polyformer.data import MaskingConfig, Tokenizer
from polyformer.data.batching import Batch, Row
from polyformer.data.pairs import Pair, pair_row
from polyformer.data.sentence_pairs import next_sentence_pairs, sentence_order_pairs
from polyformer.data.structured import split_sentences
from polyformer.heads import HeadConfig, PretrainingConfig
from polyformer.tasks.base import MaskingTask, Rows, TaskConfig, check_room, exp, with_tables
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePairsConfig(TaskConfig):
    """Options of both kinds of pairs."""

    row_length: int = 128  # tokens of a pair, <cls> and both <sep> included
    short_share: float = 0.1  # documents whose pairs are made shorter
    draws: int = 1  # how often pairs are drawn from every document; BERT's data have 10
    pair_seed: int = 0  # of these draws
    masking: MaskingConfig = MaskingConfig()

    needs: ClassVar[tuple[str, ...]] = ("text",)
    make: ClassVar[Callable[..., Iterator[Pair]]]

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(5, row_length=self.row_length)
        at_least(1, draws=self.draws)
        at_least(0, pair_seed=self.pair_seed)
        check_room(self.batch_tokens, "row_length", self.row_length)
        if not 0 <= self.short_share <= 1:
            raise InputError(f"short_share: expected a share in [0, 1], got {self.short_share}")

    def texts(self, rows: Rows) -> Iterator[str]:
        return (row["text"] for row in rows)

    def build(self, tokenizer: Tokenizer) -> "SentencePairs":
        return SentencePairs(self, tokenizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextSentenceConfig(SentencePairsConfig):
    """Guess hidden tokens, and whether the second segment follows the first."""

    kind: ClassVar[str] = "nsp"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1, task 2"
    make = staticmethod(next_sentence_pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceOrderConfig(SentencePairsConfig):
    """Guess hidden tokens, and whether two segments were swapped."""

    masking: MaskingConfig = MaskingConfig(unit="word", longest=3)

    kind: ClassVar[str] = "sop"
    paper: ClassVar[str] = "Lan et al. 2020, section 3.1"
    make = staticmethod(sentence_order_pairs)


class SentencePairs(MaskingTask):
    """Metrics: perplexity and accuracy of hidden tokens, sentence_loss (nats a pair) and sentence_accuracy;
    loss, which is trained, is the sum of both losses.
    """

    sums = 6
    head: HeadConfig = PretrainingConfig()

    def __init__(self, config: SentencePairsConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.config = config

    @property
    def positions(self) -> int:
        return self.config.row_length

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """The model with two token types, and more where it has them."""
        return with_tables(super().adapt(config), type_vocab_size=2)

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        return self.masking.copies(self._pairs(rows, self.config.draws))

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        return self._pairs(rows, 1)

    def _pairs(self, rows: Sequence[Row], draws: int) -> list[Row]:
        documents = [self._sentences(row["text"]) for row in rows]
        generator = np.random.default_rng(self.config.pair_seed)
        options = {"length": self.config.row_length - 3, "short_share": self.config.short_share}
        found = [pair for _ in range(draws) for pair in self.config.make(documents, generator, **options)]
        if not found:
            raise InputError("text: no document has two sentences; they end in . ! ? or an empty line")
        return [pair_row(pair, cls_id=self.cls, sep_id=self.sep) for pair in found]

    def _sentences(self, text: str) -> list[list[int]]:
        """The token ids of every sentence; all but the first keep the space before them."""
        sentences = split_sentences(text)
        return self.tokenizer.encode_batch([f" {one}" if i else one for i, one in enumerate(sentences)])

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        output, labels, pairs = model(**batch), batch["labels"], batch["sentence_labels"]
        logits, sentence = output.predictions()
        count = self.weight(batch)
        telling = F.cross_entropy(sentence.double(), pairs, reduction="sum")
        guessing = (output.loss.double() - telling / len(pairs)) * count
        right = [(logits.argmax(-1) == labels).sum(), (sentence.argmax(-1) == pairs).sum()]
        numbers = [guessing, right[0], guessing.new_tensor(count), telling, right[1], len(pairs)]
        return torch.stack(
            [torch.as_tensor(one, dtype=torch.float64, device=labels.device) for one in numbers]
        )

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        nats, right, tokens, telling, found, pairs = totals
        guessing, sentence = nats / max(tokens, 1), telling / max(pairs, 1)
        return {
            "loss": guessing + sentence,
            "perplexity": exp(guessing),
            "accuracy": right / max(tokens, 1),
            "sentence_loss": sentence,
            "sentence_accuracy": found / max(pairs, 1),
        }
