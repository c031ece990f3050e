"""Adaptive embeddings: rarer tokens have narrower vectors, and each cluster of tokens is projected to E.

    vector(w) = P_i W_i[w - c_i]        w in cluster i: the tokens c_i .. c_(i+1) - 1

W_i [V_i, d_i] with d_i = d_embed // div_val^i, P_i [E, d_i]. With `div_val` 1 all vectors have the same
width: there is a single table, with a projection if its width is not E. Tokens must be numbered from frequent
to rare. Baevski and Auli 2019, section 3; with the options of the Transformer-XL authors' code.
"""

import dataclasses
import itertools

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.quantized import weight_of
from polyformer.core.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(Config):
    """The clusters of a vocabulary: the first token of all but the first, and the widths of vectors.

    `d_embed`: width of the first cluster's vectors, by default hidden_size; each further cluster's vectors
    are `div_val` times narrower.
    """

    cutoffs: tuple[int, ...] = ()
    div_val: PositiveInt = 4
    d_embed: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_cutoffs(self.cutoffs)

    @property
    def tables(self) -> int:
        """Return the number of tables."""
        return 1 if self.div_val == 1 else len(self.cutoffs) + 1

    def clusters(self, vocab_size: int) -> list[slice]:
        """Return the tokens of each cluster; raises `InputError` for cut-offs beyond the vocabulary."""
        check_cutoffs(self.cutoffs, vocab_size)
        bounds = [0, *self.cutoffs, vocab_size]
        return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def tokens(self, vocab_size: int) -> list[slice]:
        """Return the tokens of each table."""
        clusters = self.clusters(vocab_size)
        return clusters if self.tables == len(clusters) else [slice(0, vocab_size)]

    def width(self, cluster: int, hidden_size: int) -> int:
        """Return d_i, the width of a cluster's vectors."""
        width = (self.d_embed or hidden_size) // self.div_val**cluster
        if width < 1:
            raise InputError(
                f"div_val: {self.d_embed or hidden_size} // {self.div_val}^{cluster} gives the vectors of "
                f"cluster {cluster} no channel; use a smaller div_val or fewer cutoffs"
            )
        return width

    def projects(self, hidden_size: int) -> bool:
        """Return whether vectors are projected to E, because some have another width."""
        return self.div_val > 1 or self.width(0, hidden_size) != hidden_size

    @classmethod
    def examples(cls) -> tuple["AdaptiveConfig", ...]:
        return cls(cutoffs=(3, 8), div_val=2), cls(cutoffs=(5,), div_val=1, d_embed=6)


def check_cutoffs(cutoffs: tuple[int, ...], vocab_size: int | None = None) -> None:
    """Raise `InputError` unless cut-offs increase, from 1 or more to less than the size of the vocabulary."""
    bounds = (0, *cutoffs) if vocab_size is None else (0, *cutoffs, vocab_size)
    if any(start >= stop for start, stop in itertools.pairwise(bounds)):
        end = "" if vocab_size is None else f" below vocab_size {vocab_size}"
        raise InputError(f"cutoffs: expected increasing numbers from 1{end}, got {list(cutoffs)}")


class AdaptiveEmbedding(nn.Module):
    """A table of token vectors: ids [...] -> vectors [..., E]."""

    def __init__(self, config: AdaptiveConfig, vocab_size: int, hidden_size: int):
        super().__init__()
        self.config, self.hidden_size = config, hidden_size
        self.tokens = config.tokens(vocab_size)
        widths = [config.width(i, hidden_size) for i in range(config.tables)]
        self.tables = nn.ModuleList(
            nn.Embedding(run.stop - run.start, width) for run, width in zip(self.tokens, widths)
        )
        projects = config.projects(hidden_size)
        self.projections = nn.ModuleList(
            Linear(width, hidden_size, bias=False) for width in widths if projects
        )

    def matrix(self) -> Tensor:
        """Return the equivalent table [V, E]."""
        return torch.cat([self._project(i, weight_of(table)) for i, table in enumerate(self.tables)])

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows of `matrix`; only the requested rows are computed."""
        # div_val 1: all tokens have the same width and one table.
        if len(self.tables) == 1:
            return self._project(0, self.tables[0](ids))
        # [N], the tokens of all rows.
        flat = ids.reshape(-1)
        vectors = torch.zeros((), device=ids.device)
        indices, parts = [], []
        for i, (run, table) in enumerate(zip(self.tokens, self.tables)):
            inside = (flat >= run.start) & (flat < run.stop)
            if torch.compiler.is_compiling():  # fixed shapes: every token is looked up in every table
                rows = self._project(i, table((flat - run.start).clamp(0, run.stop - run.start - 1)))
                vectors = vectors + torch.where(inside.unsqueeze(1), rows, 0)
                continue
            indices.append(self._token_indices(inside, i))
            # P_i W_i[w - c_i], only for the tokens of cluster i.
            parts.append(self._project(i, table(flat.index_select(0, indices[-1]) - run.start)))
        if indices:
            # Vectors are computed cluster by cluster; `inverse` restores the order of the tokens.
            order = torch.cat(indices)
            inverse = torch.empty_like(order).scatter_(
                0, order, torch.arange(len(order), device=order.device)
            )
            vectors = torch.cat(parts).index_select(0, inverse)
        return vectors.view(*ids.shape, self.hidden_size)

    @staticmethod
    def _token_indices(inside: Tensor, cluster: int) -> Tensor:
        """Return the places of the tokens of a cluster.

        On the meta device, which traces only shapes, all tokens are in the first, the most expensive cluster.
        """
        if not inside.is_meta:
            return inside.nonzero().squeeze(1)
        return torch.arange(0 if cluster else len(inside), device=inside.device)

    def _project(self, cluster: int, x: Tensor) -> Tensor:
        return self.projections[cluster](x) if len(self.projections) else x
