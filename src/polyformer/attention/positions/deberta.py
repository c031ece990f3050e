"""DeBERTa's disentangled attention: content-content, content-position and position-content terms in scores.

    score_ij = (q_i . k_j + q_i . kr_e + qr_e . k_j) / sqrt(D (1 + terms))
    e = clip(d + k, 0, 2k - 1), the row of distance d = i - j in a table of 2k relative embeddings [2k, E]

All layers share the table; each layer computes the projections kr and qr [H, 2k, D] of it. In the first
version (He et al. 2021, section 3.1) each layer has separate matrices for them and k is the longest distance.
Since the second version these matrices are the content projections of the layer, the table is normalised, and
distances beyond half of the rows of a side share rows logarithmically up to `max_relative_positions`. Each
layer projects 2k rows, or one row per distance if there are fewer distances: no memory grows with Tq x Tk.
An exported graph always projects 2k rows.

Equation 4 reads the position that is multiplied with key j at delta(j, i), its mirror image. The released
models read both terms at delta(i, j), and this module does the same unless `mirrored` is set. A bias in kr
would shift all scores of a query alike, so kr has no bias. With `absolute` a table of positions is also added
to the input, which the enhanced mask decoder of the paper makes unnecessary.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.functional.relative import Relative
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site, check_positions
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import Dropout
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import LayerNorm
from polyformer.core.ranges import PositiveInt, Probability
from polyformer.core.sequence.context import Context

TERMS = ("c2p", "p2c")
"""The terms with positions: content to position (q_i . kr_e) and position to content (qr_e . k_j)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DebertaConfig(PositionConfig):
    """Disentangled attention: content and relative positions have separate terms in the scores.

    The released second and third versions use `buckets=256, share_projections=True, norm_embeddings=True`,
    the first version uses the defaults.
    """

    max_relative_positions: PositiveInt | None = None  # k in tokens; by default max_position_embeddings
    terms: tuple[str, ...] = TERMS  # one or both of these
    buckets: int | None = None  # rows for each side; None for a row for each distance
    share_projections: bool = False  # kr and qr by the content projections of the layer
    norm_embeddings: bool = False  # a LayerNorm over the table
    eps: float = 1e-7  # of that norm
    dropout: Probability = 0.0  # of the table's entries
    mirrored: bool = False  # p2c at delta(j, i), as in equation 4
    absolute: bool = False  # adds a learned position to the input too; a longer text is then an error

    kind: ClassVar[str] = "deberta"
    paper: ClassVar[str] = "He et al. 2021 (DeBERTa), section 3.1"

    def __post_init__(self) -> None:
        if not self.terms or len(set(self.terms)) < len(self.terms) or not set(self.terms) <= set(TERMS):
            raise InputError(f"terms: expected one or both of {TERMS}, got {self.terms}")
        if self.buckets is not None and (self.buckets < 4 or self.buckets % 2):
            raise InputError(f"buckets: expected an even number of 4 or more, or None, got {self.buckets}")

    @classmethod
    def examples(cls) -> tuple["DebertaConfig", ...]:
        later = cls(max_relative_positions=16, buckets=4, share_projections=True, norm_embeddings=True)
        return cls(), later, cls(max_relative_positions=3, terms=("p2c",), mirrored=True, absolute=True)

    def with_max_positions(self, before: int, after: int) -> "DebertaConfig":
        """Return the configuration with the same longest distance: the table has a row per distance."""
        return dataclasses.replace(self, max_relative_positions=self.max_relative_positions or before)

    def build(self, shape: Shape) -> "Deberta":
        return Deberta(self, shape)


class Deberta(Position):
    """A table of relative embeddings for the stack and the projections of the table for each layer."""

    embeds_layers = False

    adds_to_queries = True

    def __init__(self, config: DebertaConfig, shape: Shape):
        super().__init__()
        self.config, self.num_heads = config, shape.num_heads
        self.max_distance = self.farthest = config.max_relative_positions or shape.max_positions
        if config.buckets is not None and self.max_distance <= config.buckets // 2 + 1:
            least = config.buckets // 2 + 2
            raise InputError(
                f"max_relative_positions: {config.buckets} buckets need {least} tokens or more, "
                f"got {self.max_distance}"
            )
        self.rows = config.buckets or self.max_distance
        self.table = nn.Embedding(2 * self.rows, shape.hidden_size)
        self.norm = LayerNorm(shape.hidden_size, eps=config.eps) if config.norm_embeddings else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.factor = (1 + len(config.terms)) ** -0.5
        own = () if config.share_projections else config.terms
        widths, layers = (shape.hidden_size, shape.num_heads * shape.head_size), range(shape.num_layers)
        self.keys = nn.ModuleList(Linear(*widths, bias=False) for _ in layers if "c2p" in own)
        self.queries = nn.ModuleList(Linear(*widths) for _ in layers if "p2c" in own)
        self.absolute = nn.Embedding(shape.max_positions, shape.input_size) if config.absolute else None
        self.max_positions = shape.max_positions if config.absolute else None

    def position_tables(self) -> dict[str, int]:
        """Return the table of absolute positions if there is one."""
        return {} if self.absolute is None else {"absolute.weight": 0}

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + absolute[p] at the first layer with `absolute`, else x."""
        if self.absolute is None or layer:
            return x
        check_positions(pos, self.absolute.num_embeddings)
        return x + self.absolute(pos)

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """Return the queries scaled by 1 / sqrt(1 + terms); the mechanism divides by sqrt(D)."""
        return q * self.factor, k

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative:
        """Return kr_e and qr_e for every distance of the call."""
        least, greatest = context.distances
        distance = torch.arange(least, greatest + 1, device=q.device)
        table = self.dropout(self.norm(self.table.weight))
        keys = queries = None
        if "c2p" in self.config.terms:
            keys = self._project("keys", table, self.table_row(distance), site).to(q.dtype)
        if "p2c" in self.config.terms:
            entry = self.table_row(-distance if self.config.mirrored else distance)
            # kr is multiplied with queries that `rotate` has scaled; k is not scaled, so qr is.
            queries = self._project("queries", table, entry, site).to(q.dtype) * self.factor
        return Relative(first=least, position_keys=keys, position_queries=queries)

    def table_row(self, distance: Tensor) -> Tensor:
        """Return the row of the table for each distance."""
        if self.config.buckets is not None:
            distance = log_buckets(distance, self.config.buckets, self.max_distance)
        return (distance + self.rows).clamp(0, 2 * self.rows - 1)

    def _project(self, what: str, table: Tensor, entry: Tensor, site: Site) -> Tensor:
        """Return the rows `table_row` of the table [2k, E] as keys or queries of all heads, [H, R, D]."""
        # An exported graph takes texts of every length, so it cannot choose by the length.
        few = not torch.compiler.is_exporting() and entry.shape[0] < table.shape[0]
        rows = table[entry] if few else table
        if self.config.share_projections:
            heads = site.key(rows) if what == "keys" else site.query(rows)
        else:
            heads = self.get_submodule(f"{what}.{site.layer}")(rows)
            heads = heads.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        return heads if few else heads[:, entry]


def log_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of distances of both signs: exact up to half of `buckets`, then logarithmic.

    The distance `max_distance` - 1 has the bucket `buckets` - 1; farther distances have higher buckets.
    """
    half = buckets // 2
    # The released models compute their buckets in float32; float64 would move some boundaries.
    size = distance.abs().clamp_min(half).float() / half
    end = torch.full((), (max_distance - 1) / half, device=distance.device).log()
    far = half + (size.log() / end * (half - 1)).ceil().long()
    return torch.where(distance.abs() <= half, distance, far * distance.sign())
