"""Adaptive softmax: a vocabulary in clusters of decreasing frequency, few of them needed by a text.

With cluster 0 the frequent tokens c_0 = 0 .. c_1 - 1, and cluster i > 0 the tokens c_i .. c_(i+1) - 1,

    head = log softmax([P_0^T h W_0^T + b_0,  P_0^T h G^T + g])       c_1 tokens, then one entry per cluster
    log p(w) = head[w]                                                 w in cluster 0
    log p(w) = head[c_1 + i - 1] + log softmax(P_i^T h W_i^T + b_i)[w - c_i]      w in cluster i

W_i [V_i, d_i] are token vectors, P_i [E, d_i] a projection to their width (none if d_i = E), and G [K, d_0]
the vectors of K clusters. A loss needs the head for every token, but cluster i only for its tokens: about V_0
+ K + sum_i p_i V_i logits per token instead of V, with p_i the share of a text in cluster i. Grave et al.
2017, section 4; projections and narrower vectors: Baevski and Auli 2019, section 3.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.host_values import IGNORED, check_labels
from polyformer.core.ops.cross_entropy import linear_cross_entropy
from polyformer.core.ops.linear import linear


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """The parameters of one cluster: vectors W [V_i, d_i], their bias [V_i], projection P [E, d_i].

    The vectors of the first cluster are followed by the vectors of the other clusters, G [K, d_0].
    """

    vectors: Tensor
    bias: Tensor | None = None
    projection: Tensor | None = None

    def projected(self, hidden: Tensor) -> Tensor:
        """Return P^T h: hidden [..., E] -> [..., d_i]."""
        return hidden if self.projection is None else linear(hidden, self.projection.t())

    def log_softmax(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities of the cluster's entries: hidden [..., E] -> [..., V_i]."""
        logits = linear(self.projected(hidden), self.vectors, self.bias)
        return F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


def log_probabilities(hidden: Tensor, clusters: Sequence[Cluster]) -> Tensor:
    """Return the log-probabilities of all tokens: hidden [..., E] -> [..., V], in the dtype of hidden."""
    head = clusters[0].log_softmax(hidden)
    frequent = head.shape[-1] - (len(clusters) - 1)
    tails = [
        head[..., frequent + i : frequent + i + 1] + cluster.log_softmax(hidden)
        for i, cluster in enumerate(clusters[1:])
    ]
    return torch.cat([head[..., :frequent], *tails], -1).to(hidden.dtype)


def adaptive_cross_entropy(hidden: Tensor, clusters: Sequence[Cluster], labels: Tensor) -> Tensor:
    """Return the mean of -log p(label), with logits only for clusters that contain labels.

    Args:
        hidden: [..., E]. labels: [...] in 0..V-1, or -100 for tokens without a label; without any labels
            the loss is 0.

    Raises:
        InputError: labels of another shape, or outside the vocabulary.
    """
    frequent = len(clusters[0].vectors) - (len(clusters) - 1)
    starts = [0, frequent]
    for cluster in clusters[1:]:
        starts.append(starts[-1] + len(cluster.vectors))
    check_labels(labels, hidden.shape[:-1], starts[-1])
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    first, count = labels, (labels != IGNORED).sum().clamp_min(1)
    tails = []
    for i, cluster in enumerate(clusters[1:], 1):
        inside = (labels >= starts[i]) & (labels < starts[i + 1])
        first = torch.where(inside, frequent + i - 1, first)
        mean = _mean_of(cluster, hidden, torch.where(inside, labels - starts[i], IGNORED))
        tails.append(mean * inside.sum() / count)
    return torch.stack([_mean_of(clusters[0], hidden, first), *tails]).sum()


def _mean_of(cluster: Cluster, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of one cluster over its labelled tokens; 0 if there are none."""
    if not torch.compiler.is_compiling() and cluster.projection is not None:  # to project these rows only
        rows = (labels != IGNORED).nonzero().squeeze(1)
        hidden, labels = hidden.index_select(0, rows), labels.index_select(0, rows)
    return linear_cross_entropy(cluster.projected(hidden), cluster.vectors, cluster.bias, labels)
