"""Adaptive softmax over a vocabulary in clusters; `polyformer.core.ops.cross_entropy` has the equation.

With adaptive embeddings (`embedding.adaptive`) the head has the same clusters and, if tied, the same vectors;
with a plain table it has separate clusters. The predictions are log-probabilities; used as logits they give
the same distribution. Tokens should be numbered from frequent to rare, as in word-level vocabularies; other
orders give equally exact results, but cost more. Grave et al. 2017; Baevski and Auli 2019, section 3.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.ops.cross_entropy import Cluster, adaptive_cross_entropy, log_probabilities
from polyformer.core.ops.int8 import Int8Weight, as_matrix
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.quantized import weight_of
from polyformer.nn.heads.base import Head, HeadInput, HeadOutput, HeadShape
from polyformer.nn.heads.vocabulary import VocabularyConfig
from polyformer.nn.stack import AdaptiveConfig, AdaptiveEmbedding

Table = Tensor | Int8Weight | AdaptiveEmbedding

DEFAULT_CUTOFFS = 3 / 40, 9 / 40
"""The shares of the vocabulary at which the second and third cluster begin by default: after 20,000 and
60,000 of WikiText-103's 267,735 words, as in Baevski and Auli 2019."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveSoftmaxConfig(VocabularyConfig):
    """Adaptive softmax: the vocabulary is split into clusters, and rare tokens cost less.

    The options are the clusters of the vocabulary, and the weights that the output shares with the
    embeddings.

    `clusters`: by default the clusters of adaptive embeddings, or else 3/40 and 9/40 of the vocabulary as
    cut-offs, with narrower vectors unless the vectors are tied to a plain table. `tie_projs`: for each
    cluster whether it shares the embedding's projection, by default true with adaptive embeddings for all
    clusters except the first. `bias`: whether tokens and clusters have a bias.
    """

    clusters: AdaptiveConfig | None = None
    tie_projs: tuple[bool, ...] | None = None
    bias: bool = True

    kind: ClassVar[str] = "adaptive_softmax"
    paper: ClassVar[str] = "Grave et al. 2017, section 4; Baevski and Auli 2019, section 3"

    @classmethod
    def examples(cls) -> tuple["AdaptiveSoftmaxConfig", ...]:
        return cls(), cls(clusters=AdaptiveConfig(cutoffs=(4,), div_val=1), bias=False)

    def build(self, shape: HeadShape) -> "AdaptiveSoftmax":
        """Return the head; it has vectors of tokens only if it is not tied."""
        return AdaptiveSoftmax(shape, self)

    def resolve(self, shape: HeadShape) -> AdaptiveConfig:
        """Return the clusters for this shape; `InputError` if tied embeddings have other clusters."""
        if shape.adaptive is not None:
            if shape.tied and self.clusters not in (None, shape.adaptive):
                raise InputError(
                    f"clusters: tied to embeddings with {quote(shape.adaptive.to_dict())}, the head has no "
                    "others; leave clusters out, or set embedding.tied=False"
                )
            return self.clusters or shape.adaptive
        vocab, width = shape.vocab_size, shape.vector_size
        if self.clusters is None:
            # Small vocabularies could give the same cut-off twice, or one at the end.
            cutoffs = sorted({max(1, int(share * vocab)) for share in DEFAULT_CUTOFFS} - {vocab})
            plain = {"div_val": 1, "d_embed": width} if shape.tied else {}
            return AdaptiveConfig(cutoffs=tuple(cutoffs), **plain)
        clusters = dataclasses.replace(self.clusters, d_embed=self.clusters.d_embed or width)
        if shape.tied and (clusters.div_val, clusters.d_embed) != (1, width):
            raise InputError(
                f"clusters: the vectors of a plain table are {width} wide in all of them, expected div_val 1 "
                f"and no d_embed, got {clusters.div_val} and {clusters.d_embed}; or use embedding.adaptive, "
                "or embedding.tied=False"
            )
        return clusters


class AdaptiveSoftmax(Head):
    """A head that predicts the next token, or in an encoder masked tokens."""

    predicts_next = True
    supports_context_parallel = True

    def __init__(self, shape: HeadShape, config: AdaptiveSoftmaxConfig):
        super().__init__()
        width, vocab = shape.hidden_size, shape.vocab_size
        clusters = config.resolve(shape)
        self.clusters = clusters.clusters(vocab)
        num_clusters, projects = len(self.clusters), clusters.projects(width)
        embedded = shape.adaptive is not None and shape.adaptive.tables == clusters.tables
        self.tie_projs = _tied_projections(config, num_clusters, projects and embedded)
        self.single_table = clusters.tables == 1
        self.supports_vocabulary_parallel = not shape.tied
        widths = [clusters.width(0 if self.single_table else i, width) for i in range(num_clusters)]
        tokens = clusters.tokens(vocab)
        self.tables = nn.ModuleList(
            nn.Embedding(run.stop - run.start, size) for run, size in zip(tokens, widths) if not shape.tied
        )
        biases = [torch.zeros(run.stop - run.start) for run in tokens] if config.bias else []
        self.biases = nn.ParameterList(nn.Parameter(bias) for bias in biases)
        self.cluster = nn.Linear(widths[0], num_clusters - 1, bias=config.bias) if num_clusters > 1 else None
        own = [i for i in range(num_clusters) if projects and not self.tie_projs[i]]
        self.projections = nn.ModuleDict({str(i): Linear(widths[i], width, bias=False) for i in own})

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Return the loss, without logits that no label needs; predictions are log-probabilities."""
        clusters = self._clusters(inputs)
        # Each cluster computes only the rows that have a label in it.
        loss = None if labels is None else adaptive_cross_entropy(inputs.hidden, clusters, labels)
        return loss, lambda: log_probabilities(inputs.hidden, clusters)

    def _clusters(self, inputs: HeadInput) -> list[Cluster]:
        """Return the weights that predict the tokens of each cluster."""
        tables, biases = self._tables(inputs.table), list(self.biases)
        if self.single_table:  # `split` has a single gradient table; each slice would have its own
            sizes = [run.stop - run.start for run in self.clusters]
            tables = list(tables[0].split(sizes))
            biases = [part for bias in biases for part in bias.split(sizes)]
        result = []
        for i, vectors in enumerate(tables):
            bias = biases[i] if biases else None
            if i == 0 and self.cluster is not None:
                # The first softmax also predicts the cluster: its rows are frequent tokens and clusters.
                vectors = torch.cat([vectors, self.cluster.weight])
                bias = None if bias is None else torch.cat([bias, self.cluster.bias])
            result.append(Cluster(vectors, bias, self._projection(i, inputs.table)))
        return result

    def _tables(self, table: Table) -> list[Tensor]:
        """Return the vectors of tokens: the head's or the embedding's."""
        if len(self.tables):
            return [weight_of(own) for own in self.tables]
        if isinstance(table, AdaptiveEmbedding):
            return [weight_of(own) for own in table.tables]
        return [as_matrix(table)]

    def _projection(self, cluster: int, table: Table) -> Tensor | None:
        if str(cluster) in self.projections:
            return weight_of(self.projections[str(cluster)])
        if not self.tie_projs[cluster]:
            return None
        assert isinstance(table, AdaptiveEmbedding)
        return weight_of(table.projections[0 if self.single_table else cluster])


def _tied_projections(config: AdaptiveSoftmaxConfig, num_clusters: int, can_tie: bool) -> tuple[bool, ...]:
    """Return for each cluster whether it shares the projection of an existing embedding."""
    wanted = config.tie_projs
    if wanted is None:
        wanted = (False, *(True for _ in range(num_clusters - 1)))
    elif len(wanted) != num_clusters:
        raise InputError(
            f"tie_projs: expected a value for each of {num_clusters} clusters, got {len(wanted)}"
        )
    return tuple(can_tie and tied for tied in wanted)
