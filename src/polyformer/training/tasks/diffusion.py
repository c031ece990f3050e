"""Masked diffusion: a language model that predicts all masked tokens of a text at once.

    kind                the model reads                         the loss of a text of L tokens
    masked_diffusion    the text, a random share t masked       sum over masked i of -log p(x_i) / (t L)
      with block_size   the same for each block, and a clean    the same for each block
                          copy (pattern `BlockDiffusion`)

t is uniform in (0, 1] for each text, and new in every epoch. The expectation of the loss is an upper bound of
-log p(x) / L: the mean of -log p(x) / L over all orders in which the tokens can be predicted one by one (Ou
et al. 2025, theorem 2). Nie et al. 2025 (LLaDA), equation 3 and algorithm 1; Sahoo et al. 2024 (MDLM),
section 3.

With `block_size` a text is written block after block, and each block by diffusion given the blocks before it.
Blocks of 1 token are an autoregressive model. A row has two copies of the text, so that a pass takes at least
twice as long. Arriola et al. 2025 (BD3-LM), section 3.

A text is <bos> text <eos> or, in packed rows, a part of it; all its tokens but <bos> are predicted. Held-out
texts are measured by `LikelihoodBound`. The model is an encoder: its tokens see both sides.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Interval
from torch import Tensor, nn

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import BlockDiffusion
from polyformer.attention.patterns.base import contains
from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED, batch_to_device
from polyformer.core.ranges import PositiveInt
from polyformer.data import Tokenizer
from polyformer.data.rows import Batch, Row
from polyformer.data.rows.masking import MaskedText, mask_by_count, mask_by_rate
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.training.tasks.base import Metrics, ModelLoss
from polyformer.training.tasks.masked import DocumentRows
from polyformer.training.tasks.text import (
    Continuation,
    TextArchitecture,
    TextTask,
    TextTaskConfig,
    required,
    stacked,
    text_counts,
    text_metrics,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedDiffusionConfig(TextTaskConfig):
    """Masked diffusion language model (LLaDA): predict the masked tokens of a text at any masking rate."""

    row_length: int = 128  # tokens per row, of one copy
    packed: bool = True  # False: no row contains parts of two documents
    block_size: PositiveInt | None = None  # tokens that are written together; None for the whole text
    least_rate: Annotated[float, Interval(ge=0, lt=1)] = 1e-3  # of masked tokens in training, as released
    samples: Annotated[int, Ge(2)] = 4  # masks of each held-out row; the standard error needs two

    kind: ClassVar[str] = "masked_diffusion"
    paper: ClassVar[str] = "Nie et al. 2025 (LLaDA), section 2.2"


def begin_and_end(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the ids of <bos> and <eos>."""
    return required(tokenizer.bos_id, "<bos>"), required(tokenizer.eos_id, "<eos>")


class DiffusedRows(DocumentRows):
    """Rows of documents with masked tokens, their labels and the weights of these."""

    config: MaskedDiffusionConfig
    marks = staticmethod(begin_and_end)

    def __init__(self, config: MaskedDiffusionConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.mask_id, self.size = required(tokenizer.mask_id, "<mask>"), config.block_size
        self.corrupt = self.by_rate

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of `prepare_held_out`; tokens are masked when a row enters a batch."""
        return self.prepare_held_out(rows)

    def count(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the words and bytes of the text."""
        return text_counts(self.tokenizer, rows)

    def by_rate(self, row: Row, generator: np.random.Generator) -> Row:
        """Return a row of training."""
        row, texts = self._texts(row)
        least = self.config.least_rate
        return self._noised(row, mask_by_rate(row["input_ids"], texts, generator, self.mask_id, least))

    def by_count(self, row: Row, generator: np.random.Generator) -> Row:
        """Return a row of evaluation."""
        row, texts = self._texts(row)
        return self._noised(row, mask_by_count(row["input_ids"], texts, generator, self.mask_id))

    def _texts(self, row: Row) -> tuple[Row, np.ndarray]:
        """Return the row without padding, and the number of the text, or of the block, of each token [T]."""
        row = {name: np.asarray(values) for name, values in row.items() if name != "labels"}
        real = row.pop("attention_mask", np.ones(len(row["input_ids"]))) != 0
        row = {name: values[real] for name, values in row.items()}
        ids = row["input_ids"]
        document = row.get("document_ids", np.zeros_like(ids)).astype(np.int64)
        row["position_ids"] = row.get("position_ids", np.arange(len(ids)))
        block = row["position_ids"] // (self.size or len(ids) + 1)
        number = document * (len(ids) + 1) + block
        texts, masked = np.full(len(ids), -1), ids != self.cls
        texts[masked] = np.unique(number[masked], return_inverse=True)[1]
        return row, texts

    def _noised(self, row: Row, masked: MaskedText) -> Row:
        """Return the masked row; with blocks, each document is followed by its clean copy."""
        noised = {"input_ids": masked.input_ids, "labels": masked.labels, "label_weights": masked.weights}
        if self.size is None:
            return {**row, **noised}
        length = len(row["input_ids"])
        starts = np.flatnonzero(np.diff(row["document_ids"])) + 1 if "document_ids" in row else []
        runs = np.split(np.arange(length), starts)
        order = np.concatenate([part for run in runs for part in (run, run)])
        first = np.concatenate([np.repeat([1, 0], len(run)) for run in runs])
        clean = {"input_ids": row["input_ids"], "labels": np.full(length, IGNORED), "label_weights": 0.0}
        both = {
            name: np.where(first, values[order], np.broadcast_to(clean[name], length)[order])
            for name, values in noised.items()
        }
        return {**{name: values[order] for name, values in row.items()}, **both, "segment_ids": first}


def diffusion_nats(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of -log p over the masked tokens of each row, [B].

    logits: [B, T, V]. labels: [B, T], -100 except at masked tokens. weights: [B, T].
    """
    masked = labels != IGNORED
    nats = F.cross_entropy(logits[masked].float(), labels[masked], reduction="none")
    rows = torch.zeros(len(labels), dtype=nats.dtype, device=nats.device)
    return rows.index_add(0, masked.nonzero()[:, 0], nats * weights[masked])


def token_count(batch: Batch) -> int:
    """Return the number of tokens that could have been masked."""
    return int((batch["label_weights"] > 0).sum())


def row_nats(model: nn.Module, batch: Batch) -> Tensor:
    """Return `diffusion_nats` of a batch with masked tokens."""
    inputs = dict(batch)
    labels, weights = inputs.pop("labels"), inputs.pop("label_weights")
    return diffusion_nats(model(**inputs).logits, labels, weights)


class MaskedDiffusionLoss(ModelLoss):
    """The weighted loss of masked tokens, a mean over all tokens that could have been masked.

    Terms that layers add to a model's own loss, such as for the balance of experts, are not part of it.
    """

    plain = False

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of the module's docstring, a mean over the texts weighted by their lengths."""
        return row_nats(model, batch).sum() / max(token_count(batch), 1)

    def weight(self, batch: Batch) -> int:
        """Return the number of tokens that could have been masked."""
        return token_count(batch)


class LikelihoodBound(Metrics):
    """An upper bound of the loss and the perplexity of a text, estimated by masks of random sizes.

        bound(x) = E_l E_(l of L tokens) [ L / l * sum over the masked tokens i of -log p(x_i) ]

    Nie et al. 2025, equation 6. Of K samples for each row the sum of their means is the bound in nats, and

        standard error^2 = sum over rows of s^2 / K        s^2: the sample variance of a row

    is of the choice of masks, not of the choice of texts. The masks are a function of the tokens of the row,
    the same in every evaluation.
    """

    sums = 3

    def __init__(self, rows: DiffusedRows, samples: int):
        self.rows, self.samples = rows, samples

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the bound in nats, the square of its standard error, and the number of tokens."""
        device = next(model.parameters()).device
        clean = {name: values.cpu().numpy() for name, values in batch.items()}
        rows = [{name: values[i] for name, values in clean.items()} for i in range(len(batch["input_ids"]))]
        drawn, tokens = [], 0
        for number in range(self.samples):
            noised = self.rows.collate([self.rows.by_count(row, seeded(row, number)) for row in rows])
            tokens = token_count(noised)
            drawn.append(row_nats(model, batch_to_device(noised, device)).double())
        nats = torch.stack(drawn)
        return stacked(
            nats.mean(0).sum(), (nats.var(0) / self.samples).sum(), tokens, device=batch["input_ids"].device
        )

    def values(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return loss (nats per token) with its standard_error, and perplexity exp(loss); with `counts` also
        word_perplexity and bits_per_byte. All but the standard error are upper bounds."""
        nats, variance, tokens = totals
        return {**text_metrics(nats, tokens, counts), "standard_error": math.sqrt(variance) / max(tokens, 1)}


def seeded(row: Row, number: int) -> np.random.Generator:
    """Return the generator of the masks of a row, for sample `number`."""
    return np.random.default_rng([number, zlib.crc32(row["input_ids"].astype(np.int64).tobytes())])


class MaskedDiffusion(TextTask, Continuation, config=MaskedDiffusionConfig):
    """Masked diffusion, measured by `LikelihoodBound`."""

    config: MaskedDiffusionConfig
    rows: DiffusedRows
    metrics: LikelihoodBound
    command = "generate"

    def __init__(self, config: MaskedDiffusionConfig, tokenizer: Tokenizer):
        rows = DiffusedRows(config, tokenizer)
        super().__init__(
            config,
            tokenizer,
            rows=rows,
            architecture=TextArchitecture(
                "encoder",
                LanguageModelConfig(),
                tokenizer,
                config.row_length,
                packs_documents=config.packed,
                change=partial(fitted, mask_id=rows.mask_id, size=config.block_size),
            ),
            objective=MaskedDiffusionLoss(),
            metrics=LikelihoodBound(rows, config.samples),
        )

    def start(self, prompt: str) -> list[int]:
        """Return the token ids of a document that starts with `prompt`."""
        return [self.rows.cls, *self.tokenizer.encode(prompt)]


def fitted(config: ModelConfig, mask_id: int, size: int | None) -> ModelConfig:
    """Return `config` with the mask token and, for blocks of `size` tokens, the pattern of blocks.

    Raises `InputError` for attention with another pattern than the blocks need, and for blocks in the model
    without blocks in the task.
    """
    stack = config.encoder
    assert stack is not None
    mechanism = stack.attention.mechanism
    config = dataclasses.replace(config, special=dataclasses.replace(config.special, mask=mask_id))
    if size is None:
        if contains(mechanism, BlockDiffusion):
            raise InputError(
                "task.block_size: the model's attention has blocks, BlockDiffusion; set it to their size"
            )
        return config
    blocks = BlockDiffusion(size)
    if not isinstance(mechanism, SoftmaxConfig) or mechanism.pattern not in (None, blocks):
        raise InputError(
            f"task.block_size: blocks of {size} tokens need the attention {blocks.to_text()}, and the model "
            "has another; leave model.attention out"
        )
    attention = dataclasses.replace(stack.attention, mechanism=dataclasses.replace(mechanism, pattern=blocks))
    return dataclasses.replace(config, encoder=dataclasses.replace(stack, attention=attention))
