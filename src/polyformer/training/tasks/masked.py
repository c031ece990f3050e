"""Tasks that predict masked tokens.

    kind      row                                        loss
    mlm       <cls> text <sep>, packed                   cross-entropy of the masked tokens
    tlm       <cls> source <sep> <cls> target <sep>      cross-entropy of the masked tokens
    electra   as mlm                                     generator's mlm + detection_weight * the model's
                                                           replaced-token detection

**mlm**, masked language modelling. Devlin et al. 2019, section 3.1, task 1. Documents are packed into rows
and do not attend to each other, or have separate rows, for attention that cannot separate packed documents.
Masked tokens are redrawn in every epoch (Liu et al. 2019, section 4.1) unless `masking` is static; they are
fixed for held-out text.

**tlm**, translation language modelling. Tokens are masked on both sides; positions restart in the second
language, and every token has a language id. Relative position schemes do not restart. Longer pairs are
truncated. Lample and Conneau 2019 (XLM), section 3.4.

**electra**: a generator replaces tokens, the model detects them. Clark et al. 2020. The model of the run is
the discriminator. The generator has the same depth and a fraction of the width, shares the embeddings (token
and position tables, token types and norm, section 3.2) and is saved in a subfolder. See
`polyformer.training.objectives` for the replaced tokens. Every chosen token becomes <mask> (section 2; the
released code keeps 15 % of them).
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.positions import Learned
from polyformer.core.host_values import IGNORED
from polyformer.core.ranges import NonNegativeInt, PositiveFloat, PositiveShare
from polyformer.data import Masking, MaskingConfig, Tokenizer, pack
from polyformer.data.rows import Batch, Row
from polyformer.data.rows.structured import translation_row
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.feedforward.feedforward import SizedConfig
from polyformer.nn.heads import DetectConfig, MaskedConfig
from polyformer.training.objectives import draw, replaced
from polyformer.training.tasks.base import Metrics, ModelLoss
from polyformer.training.tasks.text import (
    TextArchitecture,
    TextRows,
    TextTask,
    TextTaskConfig,
    TokenPredictions,
    exp,
    required,
    row_marks,
    stacked,
)


class MaskedRows(TextRows):
    """Rows with tokens that are masked according to the `masking` of the configuration."""

    corrupts_held_out = True

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cls, self.sep = row_marks(tokenizer)
        self.masking = Masking(config.masking, tokenizer, required(tokenizer.mask_id, "<mask>"))
        self.corrupt = self.masking.corrupt

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of `prepare_held_out`; with static masking, one copy of them per mask."""
        return self.masking.copies(self.prepare_held_out(rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedDocumentsConfig(TextTaskConfig):
    """Options of tasks that mask tokens of documents."""

    row_length: int = 128  # tokens per row
    packed: bool = True  # False: no row contains parts of two documents
    masking: MaskingConfig = MaskingConfig()


class DocumentRows(TextRows):
    """Rows of documents, each <cls> text <sep>, packed end to end or in separate rows."""

    config: Any
    marks = staticmethod(row_marks)

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.cls, self.sep = self.marks(tokenizer)
        if config.packed:
            self.frame = self.cls, self.sep

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows of at most `row_length` tokens: packed documents, or each in separate rows."""
        length = self.config.row_length
        documents = [[self.cls, *ids, self.sep] for ids in self.encoded(rows)]
        if self.config.packed:
            return list(pack(documents, length, pad_id=self.collate.pad_id))
        pieces = (ids[start : start + length] for ids in documents for start in range(0, len(ids), length))
        return [{"input_ids": np.asarray(piece, np.int32)} for piece in pieces]


class MaskedDocuments(MaskedRows, DocumentRows):
    """Rows of documents with masked tokens; prepared text needs masks that are redrawn in every epoch."""

    config: MaskedDocumentsConfig

    def __init__(self, config: MaskedDocumentsConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if config.masking.static_copies:
            self.frame = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedModellingConfig(MaskedDocumentsConfig):
    """Masked language model (BERT): predict the masked tokens of a text."""

    kind: ClassVar[str] = "mlm"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1"


class MaskedModelling(TextTask, config=MaskedModellingConfig):
    """Masked language modelling, with metrics over the masked tokens.

    The metrics are loss (nats per token), perplexity exp(loss) and accuracy.
    """

    def __init__(self, config: MaskedModellingConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=MaskedDocuments(config, tokenizer),
            architecture=TextArchitecture(
                "encoder", MaskedConfig(), tokenizer, config.row_length, packs_documents=config.packed
            ),
            metrics=TokenPredictions(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationModellingConfig(TextTaskConfig):
    """Translation language model (XLM): predict masked tokens of a text joined to its translation."""

    max_length: int = 256  # tokens of a pair, including its four special tokens
    masking: MaskingConfig = MaskingConfig()
    languages: tuple[NonNegativeInt, NonNegativeInt] = (0, 1)  # of source and target, in the model's table

    needs: ClassVar[tuple[str, ...]] = ("source", "target")
    text_columns: ClassVar[tuple[str, ...]] = ("source", "target")
    length_option: ClassVar[str] = "max_length"
    shortest: ClassVar[int] = 6
    kind: ClassVar[str] = "tlm"
    paper: ClassVar[str] = "Lample and Conneau 2019, section 3.4"


class JoinedTranslations(MaskedRows):
    """Rows of a text joined to its translation, with masked tokens on both sides."""

    config: TranslationModellingConfig

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return each pair as one row, truncated to `max_length` tokens."""
        sources, targets = (
            self.tokenizer.encode_batch([row[side] for row in rows]) for side in self.config.needs
        )
        ends = {"begin_id": self.cls, "end_id": self.sep}
        options = {"languages": self.config.languages, "length": self.config.max_length}
        return [translation_row(*pair, **ends, **options) for pair in zip(sources, targets)]


class TranslationModelling(TextTask, config=TranslationModellingConfig):
    """Translation language modelling, with metrics over the masked tokens.

    The metrics are loss (nats per token), perplexity exp(loss) and accuracy. The model has an embedding for
    at least the two languages.
    """

    def __init__(self, config: TranslationModellingConfig, tokenizer: Tokenizer):
        languages = {"num_languages": max(config.languages) + 1}
        super().__init__(
            config,
            tokenizer,
            rows=JoinedTranslations(config, tokenizer),
            architecture=TextArchitecture(
                "encoder", MaskedConfig(), tokenizer, config.max_length, tables=languages
            ),
            metrics=TokenPredictions(),
        )


GENERATOR = "generator"
"""The subfolder of the generator in the folder of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElectraConfig(MaskedDocumentsConfig):
    """Replaced-token detection (ELECTRA): detect tokens replaced by a small model that is trained jointly."""

    masking: MaskingConfig = MaskingConfig(random_share=0.0, kept_share=0.0)
    generator_size: PositiveShare = 0.25  # fraction of the model's width, feed-forward and heads; same depth
    detection_weight: PositiveFloat = 50.0

    kind: ClassVar[str] = "electra"
    paper: ClassVar[str] = "Clark et al. 2020, section 2"


@dataclasses.dataclass(frozen=True, eq=False)
class ElectraOutput:
    """The outputs of both models; [N] are the masked tokens, row by row."""

    loss: Tensor
    generator_loss: Tensor  # a mean over the masked tokens
    input_ids: Tensor  # [B, T], the discriminator's input
    logits: Tensor  # [B, T], the discriminator's
    labels: Tensor  # [B, T], 1 where a token was replaced, -100 at padding
    predicted: Tensor  # [N], the generator's most probable tokens


class GeneratorAndModel(nn.Module):
    """Both models as one module for the training loop; `model` is the discriminator."""

    def __init__(self, generator: Transformer, model: Transformer, detection_weight: float):
        super().__init__()
        self.generator, self.model, self.detection_weight = generator, model, detection_weight
        share_embeddings(generator, model)

    def forward(self, input_ids: Tensor, labels: Tensor, **context: Tensor) -> ElectraOutput:
        """Run both models on `input_ids` [B, T] with masked tokens, which are the `labels`.

        context: further inputs of both models. In evaluation the generator draws the same replacements in
        every call.
        """
        masked = self.generator(input_ids, labels=labels, **context)
        with torch.no_grad():
            hidden = masked.last_hidden_state[labels != IGNORED, None]
            logits = self.generator.next_logits(dataclasses.replace(masked, last_hidden_state=hidden))
            seeded = None if self.training else torch.Generator(input_ids.device).manual_seed(0)
            mask = context.get("attention_mask")
            real = None if mask is None else mask.bool()
            ids, is_replaced = replaced(input_ids, labels, draw(logits, seeded), real)
        output = self.model(ids, labels=is_replaced, **context)
        loss = masked.loss + self.detection_weight * output.loss
        return ElectraOutput(loss, masked.loss, ids, output.logits, is_replaced, logits.argmax(-1))


class ReplacedTokens(ModelLoss):
    """The loss of both models, which `GeneratorAndModel` adds; the generator is trained and saved too."""

    plain = False

    def __init__(self, config: ElectraConfig):
        self.config = config

    def training_module(self, model: Transformer, run: Path | None = None) -> GeneratorAndModel:
        """Return the model with its generator."""
        device = next(model.parameters()).device
        if run is None:
            generator = Transformer(generator_config(model.config, self.config.generator_size))
        else:
            generator = Transformer.from_pretrained(run / GENERATOR)
        module = GeneratorAndModel(generator.to(device), model, self.config.detection_weight)
        return module.train(model.training)

    def auxiliary_models(self, module: nn.Module) -> dict[str, Transformer]:
        """Return the generator."""
        assert isinstance(module, GeneratorAndModel)
        return {GENERATOR: module.generator}


class Detection(Metrics):
    """The metrics of both models; loss is the training loss.

    Of the generator: perplexity and accuracy over the masked tokens. Of the model: detection_loss (nats per
    token) and accuracy over all tokens, and recall and precision of replaced tokens.
    """

    sums = 9

    def __init__(self, detection_weight: float):
        self.detection_weight = detection_weight

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return sums of both models.

        For the generator: summed loss, correct predictions, masked tokens. For the model: summed loss,
        correct decisions, tokens; for replaced tokens: true positives, predicted, all.
        """
        output, tokens = model(**batch), batch["labels"]
        tokens = tokens[tokens != IGNORED]
        real = output.labels != IGNORED
        labels, logits = output.labels[real], output.logits[real]
        nats = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
        positive, actual = logits > 0, labels == 1
        return stacked(
            output.generator_loss * len(tokens),
            (output.predicted == tokens).sum(),
            len(tokens),
            nats,
            (positive == actual).sum(),
            len(labels),
            (positive & actual).sum(),
            positive.sum(),
            actual.sum(),
            device=tokens.device,
        )

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        masked_nats, predicted, masked, nats, correct, tokens, true_positive, positive, actual = totals
        generator_loss, detection_loss = masked_nats / max(masked, 1), nats / max(tokens, 1)
        return {
            "loss": generator_loss + self.detection_weight * detection_loss,
            "generator_perplexity": exp(generator_loss),
            "generator_accuracy": predicted / max(masked, 1),
            "detection_loss": detection_loss,
            "accuracy": correct / max(tokens, 1),
            "recall": true_positive / max(actual, 1),
            "precision": true_positive / max(positive, 1),
        }


class Electra(TextTask, config=ElectraConfig):
    """Replaced-token detection, measured by `Detection`."""

    def __init__(self, config: ElectraConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=MaskedDocuments(config, tokenizer),
            architecture=TextArchitecture(
                "encoder", DetectConfig(), tokenizer, config.row_length, packs_documents=config.packed
            ),
            objective=ReplacedTokens(config),
            metrics=Detection(config.detection_weight),
        )


def generator_config(model: ModelConfig, size: float) -> ModelConfig:
    """Return `model` with a fraction `size` of its width, feed-forward and heads; same head dimension."""
    stack = model.encoder
    assert stack is not None
    attention, feedforward = stack.attention, stack.feedforward
    heads = max(1, round(attention.num_attention_heads * size))
    per_head = model.hidden_size / attention.num_attention_heads
    keys = attention.num_key_value_heads
    attention = dataclasses.replace(
        attention, num_attention_heads=heads, num_key_value_heads=keys and math.gcd(keys, heads)
    )
    if isinstance(feedforward, SizedConfig):
        inner = max(1, round(feedforward.intermediate_size * size))
        feedforward = dataclasses.replace(feedforward, intermediate_size=inner)
    return dataclasses.replace(
        model,
        hidden_size=round(heads * per_head),
        embedding=dataclasses.replace(model.embedding, size=model.embedding.width(model.hidden_size)),
        encoder=dataclasses.replace(stack, attention=attention, feedforward=feedforward),
        head=MaskedConfig(),
        origin=None,
    )


def share_embeddings(generator: Transformer, model: Transformer) -> None:
    """Share the model's embeddings with the generator, except the projection to its width."""
    generator.tokens = model.tokens
    small, large = generator.encoder_embedding, model.encoder_embedding
    assert small is not None
    assert large is not None
    small.types, small.languages, small.norm = large.types, large.languages, large.norm
    assert generator.encoder is not None
    assert model.encoder is not None
    position, shared = generator.encoder.position, model.encoder.position
    if isinstance(position, Learned) and isinstance(shared, Learned):
        position.tables[0] = shared.tables[0]  # tables of later layers have the width of the stack
