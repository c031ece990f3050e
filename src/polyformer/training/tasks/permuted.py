"""Permuted language modelling: tokens are predicted in a random order, each from all before it in the order.

    kind           row                         loss
    permuted_lm    <cls> text <sep>, packed    cross-entropy of the tokens at the end of the order

In every epoch each row has a new order. Only the last tokens of it are predicted, a share 1 / K of the row,
because the first ones have too little to be predicted from; K = 6 (Yang et al. 2019, section 2.3, "partial
prediction", and appendix A.4.2). All others are known to each other. No token is masked, and the text that
the model reads is as it is; the query stream begins with the vector of <mask>. See
`polyformer.models.architectures.two_streams`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import nn

from polyformer.core.host_values import IGNORED
from polyformer.core.ranges import PositiveShare
from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Row
from polyformer.models.architectures import Transformer, TwoStreams
from polyformer.nn.heads import LanguageModelConfig
from polyformer.training.tasks.base import ModelLoss
from polyformer.training.tasks.masked import DocumentRows, TokenPredictions
from polyformer.training.tasks.text import TextArchitecture, TextTask, TextTaskConfig, required


@dataclasses.dataclass(frozen=True, kw_only=True)
class PermutedModellingConfig(TextTaskConfig):
    """Permuted language model (XLNet): predict tokens in a random order, with two streams of attention."""

    row_length: int = 128  # tokens per row
    packed: bool = True  # False: no row contains parts of two documents
    predicted: PositiveShare = 1 / 6  # of the tokens of a row: the last ones of the order

    kind: ClassVar[str] = "permuted_lm"
    paper: ClassVar[str] = "Yang et al. 2019 (XLNet), section 2"


class PermutedRows(DocumentRows):
    """Rows of documents with a random order of their tokens."""

    config: PermutedModellingConfig
    corrupts_held_out = True

    def __init__(self, config: PermutedModellingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.corrupt = self.in_order

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of `prepare_held_out`."""
        return self.prepare_held_out(rows)

    def in_order(self, row: Row, generator: np.random.Generator) -> Row:
        """Return `row` with the `ranks` of its tokens and with `labels`, the tokens of rank 1 or more."""
        ids = np.asarray(row["input_ids"])
        candidates = np.flatnonzero(np.isin(ids, self.tokenizer.ordinary_ids))
        count = min(len(candidates), max(1, round(self.config.predicted * len(candidates))))
        last = generator.permutation(candidates)[:count]
        ranks, labels = np.zeros_like(ids), np.full_like(ids, IGNORED)
        ranks[last] = np.arange(1, count + 1)
        labels[last] = ids[last]
        return {**row, "ranks": ranks, "labels": labels}


class TwoStreamLoss(ModelLoss):
    """The loss of a model with both streams of attention. mask_id: the token of the query stream."""

    plain = False

    def __init__(self, mask_id: int):
        self.mask_id = mask_id

    def training_module(self, model: Transformer, run: Path | None = None) -> nn.Module:
        """Return the model with both streams."""
        return TwoStreams(model, self.mask_id).train(model.training)


class PermutedModelling(TextTask, config=PermutedModellingConfig):
    """Permuted language modelling, with metrics over the predicted tokens.

    The metrics are loss (nats per token), perplexity exp(loss) and accuracy.
    """

    def __init__(self, config: PermutedModellingConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=PermutedRows(config, tokenizer),
            architecture=TextArchitecture(
                "encoder",
                LanguageModelConfig(bias=True),
                tokenizer,
                config.row_length,
                packs_documents=config.packed,
            ),
            objective=TwoStreamLoss(required(tokenizer.mask_id, "<mask>")),
            metrics=TokenPredictions(),
        )
