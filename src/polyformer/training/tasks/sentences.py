"""Pre-training that knows sentences: masked tokens are predicted, and with them something about sentences.

    nsp    masked language modelling + cross-entropy of the pair's label     of <cls> A <sep> B <sep>
    sop    the same loss, of the two segments of a document in either order
    cpc    (1 - w) * masked language modelling + w * contrastive             w = contrastive_weight

**nsp**, **sop**: the relation of two segments, as in BERT and ALBERT. The label of `nsp` is whether B comes
from another document, the label of `sop` whether the segments were swapped; see `data.rows.structured`. Pairs
are drawn once, `draws` times from every document, and reused in every epoch; masked tokens are drawn
according to `masking`. Devlin et al. 2019, section 3.1; Lan et al. 2020, section 3.1.

**cpc**: masked sentences are identified from their context, as in ETC. Both losses come from one pass over
rows of a document together with its masked sentences, see `polyformer.training.objectives`; single tokens are
masked in the other sentences. Documents are cut between sentences, into rows of limited global tokens and
long tokens. Ainslie et al. 2020, section 3.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Interval
from torch import Tensor, nn

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import ETC
from polyformer.attention.positions import EtcLabelsConfig
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Share, Wording
from polyformer.data import MaskingConfig, Tokenizer, mask_tokens
from polyformer.data.rows import Batch, Row
from polyformer.data.rows.structured import (
    Pair,
    documents_of,
    next_sentence_pairs,
    pair_row,
    sentence_order_pairs,
    split_sentences,
    structured,
)
from polyformer.models.config import ModelConfig
from polyformer.models.outputs import ModelOutput
from polyformer.nn.heads import MaskedConfig, PretrainingConfig
from polyformer.training.objectives import contrastive_loss, hide_sentences, pairs_of
from polyformer.training.tasks.base import Metrics, ModelLoss, label_count
from polyformer.training.tasks.masked import MaskedRows
from polyformer.training.tasks.text import (
    TextArchitecture,
    TextRows,
    TextTask,
    TextTaskConfig,
    exp,
    required,
    stacked,
)


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


class MaskedPairs(MaskedRows):
    """Rows of two segments with masked tokens, and the label of their relation."""

    config: SentencePairsConfig

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


class TokensAndPairs(Metrics):
    """The metrics of masked tokens and of pairs.

    They are perplexity and accuracy of masked tokens, sentence_loss (nats per pair) and sentence_accuracy;
    loss is the training loss, the sum of both losses.
    """

    sums = 6

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, correct predictions and number of masked tokens, then of pairs."""
        output, labels, pair_labels = model(**batch), batch["labels"], batch["sentence_labels"]
        logits, pair_logits = output.predictions()
        tokens, pairs = label_count(batch), len(pair_labels)
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

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
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


class SentencePairs(TextTask, config=SentencePairsConfig):
    """Sentence-pair pre-training, measured by `TokensAndPairs`."""

    def __init__(self, config: SentencePairsConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=MaskedPairs(config, tokenizer),
            architecture=TextArchitecture(
                "encoder", PretrainingConfig(), tokenizer, config.row_length, tables={"type_vocab_size": 2}
            ),
            metrics=TokensAndPairs(),
        )


ProperShare = Annotated[float, Interval(gt=0, lt=1), Wording("a share")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveModellingConfig(TextTaskConfig):
    """Contrastive predictive coding (ETC): predict masked tokens and recognize masked sentences."""

    row_length: int = 256  # long tokens per row, without global tokens and masked sentences
    global_tokens: Annotated[int, Ge(2)] = 32  # sentences per row; also set in the model
    mask_share: ProperShare = 0.15  # of tokens, in visible sentences
    sentence_share: ProperShare = 0.15  # of sentences, masked completely
    contrastive_weight: ProperShare = 0.2
    temperature: PositiveFloat = 1.0

    shortest: ClassVar[int] = 1
    kind: ClassVar[str] = "cpc"
    paper: ClassVar[str] = "Ainslie et al. 2020 (ETC), section 3"

    @property
    def longest_row(self) -> tuple[str, int]:
        """Return the long and global tokens in total."""
        return "row_length + global_tokens", self.row_length + self.global_tokens


class MaskedSentences(TextRows):
    """Rows of global and long tokens, with masked tokens and copies of masked sentences."""

    config: ContrastiveModellingConfig
    corrupts_held_out = True

    def __init__(self, config: ContrastiveModellingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cls, self.mask = required(tokenizer.cls_id, "<cls>"), required(tokenizer.mask_id, "<mask>")
        self.corrupt = self.mask_sentences

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows of global and long tokens of whole sentences."""
        count = self.config.global_tokens
        prepared: list[Row] = []
        for row in rows:
            sentences = self.tokenizer.encode_batch(split_sentences(row["text"]))
            documents = documents_of(sentences, global_tokens=count, long_tokens=self.config.row_length)
            prepared += [structured(each, global_id=self.cls, global_tokens=count) for each in documents]
        return prepared

    def mask_sentences(self, row: Row, generator: np.random.Generator) -> Row:
        """Mask whole sentences of a row, and tokens of the others."""
        is_long = row["token_type_ids"] == 1
        ids, numbers = row["input_ids"][is_long], row["segment_ids"][is_long]
        sentences = [ids[numbers == number] for number in range(numbers[-1] + 1)]
        masked = hide_sentences(
            sentences,
            generator,
            mask_id=self.mask,
            global_id=self.cls,
            global_tokens=self.config.global_tokens,
            share=self.config.sentence_share,
        )
        chosen = masked["segment_ids"][(masked["pair_ids"] > 0) & (masked["document_ids"] == 0)]
        visible = (masked["token_type_ids"] == 1) & (masked["document_ids"] == 0)
        visible &= ~np.isin(masked["segment_ids"], chosen)
        masked["labels"] = np.full_like(masked["input_ids"], -100)
        masked["input_ids"][visible], masked["labels"][visible] = mask_tokens(
            masked["input_ids"][visible],
            generator,
            mask_id=self.mask,
            ordinary_ids=self.tokenizer.ordinary_ids,
            share=self.config.mask_share,
        )
        return masked


class TokensAndSentences(ModelLoss):
    """The loss (1 - w) * masked language modelling + w * contrastive, from one pass over the rows."""

    plain = False

    def __init__(self, weight: float, temperature: float):
        self.contrastive_weight, self.temperature = weight, temperature

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the weighted sum of both losses."""
        output, predicted, encoded = self.run(model, batch)
        assert output.loss is not None
        weight = self.contrastive_weight
        return (1 - weight) * output.loss + weight * self.contrastive(predicted, encoded)

    def run(self, model: nn.Module, batch: Batch) -> tuple[ModelOutput, Tensor, Tensor]:
        """Return the output, and vectors [pairs, D] of masked sentences: of their context, of themselves."""
        output = model(**{name: tensor for name, tensor in batch.items() if name != "pair_ids"})
        return output, *pairs_of(output.last_hidden_state, batch["pair_ids"])

    def contrastive(self, predicted: Tensor, encoded: Tensor) -> Tensor:
        """Return the contrastive loss of the vectors of masked sentences [pairs, D]."""
        return contrastive_loss(predicted, encoded, temperature=self.temperature)


class ContrastiveMetrics(Metrics):
    """The metrics of masked language modelling and the contrastive loss; `loss` is the training loss.

    contrastive_loss (nats per masked sentence) and contrastive_accuracy depend on the number of masked
    sentences in a batch.
    """

    sums = 6

    def __init__(self, objective: TokensAndSentences):
        self.objective = objective

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss, correct predictions and number of masked tokens, then of sentences."""
        output, predicted, encoded = self.objective.run(model, batch)
        assert output.loss is not None
        labels, tokens, pairs = batch["labels"], label_count(batch), len(predicted)
        diagonal = torch.arange(pairs, device=predicted.device)
        nearest = (predicted @ encoded.T).argmax(-1) if pairs else diagonal
        return stacked(
            output.loss.double() * tokens,
            (output.logits.argmax(-1) == labels).sum(),
            tokens,
            self.objective.contrastive(predicted, encoded).double() * pairs,
            (nearest == diagonal).sum(),
            pairs,
            device=labels.device,
        )

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        nats, correct, tokens, pair_nats, correct_pairs, pairs = totals
        masked_loss, contrastive = nats / max(tokens, 1), pair_nats / max(pairs, 1)
        weight = self.objective.contrastive_weight
        return {
            "loss": (1 - weight) * masked_loss + weight * contrastive,
            "perplexity": exp(masked_loss),
            "accuracy": correct / max(tokens, 1),
            "contrastive_loss": contrastive,
            "contrastive_accuracy": correct_pairs / max(pairs, 1),
        }


def with_global_tokens(config: ModelConfig, count: int) -> ModelConfig:
    """Return `config` with a number of global tokens in its pattern, which is ETC, and position scheme."""
    assert config.encoder is not None
    attention = config.encoder.attention
    mechanism, position = attention.mechanism, config.encoder.position
    if not isinstance(mechanism, SoftmaxConfig) or not isinstance(mechanism.pattern, ETC):
        raise InputError("model: this task needs the pattern ETC; use etc-base, or attention=ETC(...)")
    pattern = dataclasses.replace(mechanism.pattern, global_tokens=count)
    attention = dataclasses.replace(attention, mechanism=dataclasses.replace(mechanism, pattern=pattern))
    if isinstance(position, EtcLabelsConfig):
        position = dataclasses.replace(position, global_tokens=count)
    encoder = dataclasses.replace(config.encoder, attention=attention, position=position)
    return dataclasses.replace(config, encoder=encoder)


class ContrastiveModelling(TextTask, config=ContrastiveModellingConfig):
    """Contrastive predictive coding, measured by `ContrastiveMetrics`."""

    def __init__(self, config: ContrastiveModellingConfig, tokenizer: Tokenizer):
        objective = TokensAndSentences(config.contrastive_weight, config.temperature)
        super().__init__(
            config,
            tokenizer,
            rows=MaskedSentences(config, tokenizer),
            architecture=TextArchitecture(
                "encoder",
                MaskedConfig(),
                tokenizer,
                config.global_tokens + config.row_length,
                change=partial(with_global_tokens, count=config.global_tokens),
            ),
            objective=objective,
            metrics=ContrastiveMetrics(objective),
        )
