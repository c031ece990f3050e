"""Hyper-connections: sub-layers f read and mix n copies of the residual stream by learned weights.

    h     = sum over m of A_m[m] H_m
    H'_i  = B[i] f(norm(h)) + sum over m of A_r[m, i] H_m

The stack starts with H_m = x for every m and ends with the sum of all H_m. Static weights are parameters; a
token's dynamic weights add numbers computed from its own streams, with rows of W for A_m, A_r and B,

    A_m[m]    + s_alpha tanh(norm(H_m) . W_m)
    A_r[m, i] + s_alpha tanh(norm(H_m) . W_r[i])
    B[m]      + s_beta  tanh(norm(H_m) . W_beta)

At first A_r is the identity, A_m the unit vector (k mod n) for sub-layer k of the stack, B ones, W zero and
both s 0.01: all streams are then equal to the one of the pre-norm block. Their sum is n times as large, which
the final norm removes. Zhu et al. 2025, sections 2.1 to 2.3. Products per token and sub-layer: n (n + 2) E,
and as many for W; memory: n streams instead of one.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.ops.autograd import without_autocast
from polyformer.core.ops.linear import linear
from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.core.ranges import PositiveInt
from polyformer.nn.block.wirings import Block, BlockConfig, SubLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConnectionsConfig(BlockConfig):
    """Hyper-connections: sub-layers read and mix copies of the residual stream by learned weights.

    `streams`: the number n of copies. `dynamic`: whether the weights of a token also depend on its streams.
    """

    streams: PositiveInt = 4
    dynamic: bool = True

    kind: ClassVar[str] = "hyper_connections"
    paper: ClassVar[str] = "Zhu et al. 2025 (Hyper-Connections), section 2"

    @classmethod
    def examples(cls) -> tuple["HyperConnectionsConfig", ...]:
        return cls(streams=3), cls(streams=2, dynamic=False)

    @property
    def stream_copies(self) -> int:
        """Return `streams`."""
        return self.streams

    @property
    def needs_tokenwise_norm(self) -> bool:
        """Return `dynamic`, as the norm of the streams counts every token n times."""
        return self.dynamic

    def for_layer(self, layer: int) -> "LayerConnectionsConfig":
        """Return the configuration of layer `layer`, which decides which stream a sub-layer reads first."""
        return LayerConnectionsConfig(connections=self, layer=layer)

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "HyperConnections":
        return self.for_layer(0).build(hidden_size, sublayers, norm, dropout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConnectionsConfig(BlockConfig):
    """Hyper-connections of a layer. Layers differ in initial values alone, so that all compare as equal."""

    connections: HyperConnectionsConfig
    layer: int = dataclasses.field(compare=False)

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "HyperConnections":
        n, first = self.connections.streams, self.layer * sublayers
        reads = [number % n for number in range(first, first + sublayers)]
        if self.connections.dynamic:
            return HyperConnections(
                hidden_size, norm, dropout, [DynamicConnections(n, read, hidden_size, norm) for read in reads]
            )
        return HyperConnections(hidden_size, norm, dropout, [Connections(n, read) for read in reads])


class HyperConnections(Block):
    """A wiring that passes n streams x [n, B, T, E] through sub-layers [B, T, E] -> [B, T, E]."""

    def __init__(self, hidden_size: int, norm: NormConfig, dropout: float, connections: list["Connections"]):
        super().__init__(hidden_size, len(connections), norm, dropout)
        self.connections = nn.ModuleList(connections)

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply H_i = B[i] dropout(f(norm(h))) + sum_m A_r[m, i] H_m for each f in turn."""
        for norm, connections, sublayer in zip(self.norms, self.connections, sublayers):
            h, mixed, beta = connections(x)
            x = mixed + beta * self.dropout(sublayer(normalize(norm, h, valid)))
        return x

    def pre_norm(self, x: Tensor) -> Tensor:
        """Return norm(h) of the first sub-layer for the streams x [n, B, T, E]."""
        return self.norms[0](self.connections[0](x)[0])


class Connections(nn.Module):
    """Static weights of a sub-layer that reads stream `read` of n at first.

    They are kept as vectors, A_r row by row: the paper does not decay them, and optimizers decay matrices.
    """

    def __init__(self, streams: int, read: int):
        super().__init__()
        identity = torch.eye(streams)
        self.reads = nn.Parameter(identity[read].clone())  # A_m
        self.mixes = nn.Parameter(identity.flatten())  # A_r
        self.writes = nn.Parameter(torch.ones(streams))  # B

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return h [B, T, E], the sums over A_r [n, B, T, E], and B as [n, 1, 1, 1], for x [n, B, T, E]."""
        table = self.table()
        return *_combine("mi,mbte->ibte", table[:, :-1], x), table[:, -1, None, None, None].to(x.dtype)

    def table(self) -> Tensor:
        """Return A_m, A_r and B side by side, [n, n + 2]."""
        mixes = self.mixes.unflatten(0, (-1, len(self.reads)))
        return torch.cat([self.reads[:, None], mixes, self.writes[:, None]], 1)


class DynamicConnections(Connections):
    """Weights that change from token to token. W [n + 2, E] has the rows of A_m, of A_r and of B."""

    def __init__(self, streams: int, read: int, hidden_size: int, norm: NormConfig):
        super().__init__(streams, read)
        self.norm = norm.build(hidden_size)
        self.weight = nn.Parameter(torch.zeros(streams + 2, hidden_size))
        self.alpha_scale = nn.Parameter(torch.tensor([0.01]))
        self.beta_scale = nn.Parameter(torch.tensor([0.01]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return h [B, T, E], the sums over A_r [n, B, T, E], and B [n, B, T, 1], for x [n, B, T, E]."""
        table, changes = self.table()[:, None, None], linear(self.norm(x), self.weight).tanh()
        alpha = table[..., :-1] + self.alpha_scale * changes[..., :-1]
        beta = table[..., -1:] + self.beta_scale * changes[..., -1:]
        return *_combine("mbti,mbte->ibte", alpha, x), beta.to(x.dtype)


def _combine(equation: str, alpha: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return h [B, T, E] and the mixed streams [n, B, T, E], in the precision of the streams."""
    with without_autocast(x):  # products in half precision would round the streams in every layer
        sums = torch.einsum(equation, alpha.to(x.dtype), x)
    return sums[0], sums[1:]
