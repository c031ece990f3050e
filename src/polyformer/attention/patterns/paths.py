"""Paths of information through layers of a sparse pattern.

In one layer a token reads the keys that its pattern allows; after n layers it depends on every token that n
steps along such pairs reach. Two arguments for sparse patterns are about these paths: two factors of a Sparse
Transformer connect every pair (Child et al. 2019, section 4.2), and random and global keys make the paths of
BigBird short (Zaheer et al. 2020, section 2).
"""

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import restricted
from polyformer.core.sequence.context import Context

MOST_LAYERS = 64
"""Layers that are followed by default: deeper models are rare."""


def path_lengths(pattern: Pattern, context: Context, heads: int = 1, layers: int = MOST_LAYERS) -> Tensor:
    """Return the fewest layers after which each query depends on each key, [T, T] int.

    0 for the token itself, -1 if `layers` layers do not connect the pair. The heads of a layer count
    together, and the residual connection keeps what a token has. `context` is a self-attention call with one
    batch row.
    """
    tokens = context.q_len
    lengths = torch.full((tokens, tokens), -1).fill_diagonal_(0)
    reached = torch.eye(tokens, dtype=torch.bool)
    period = _period(pattern, layers)
    # Numbers, because torch multiplies no booleans.
    edges = [_edges(pattern.layer_pattern(layer), context, heads).float() for layer in range(period)]
    unchanged = 0
    for layer in range(layers):
        # A token of layer n + 1 depends on all that its keys depend on after layer n.
        reached = (edges[layer % period] @ reached.float()) > 0
        new = reached & (lengths < 0)
        lengths[new] = layer + 1
        unchanged = 0 if new.any() else unchanged + 1
        if unchanged == period:
            break
    return lengths


def _period(pattern: Pattern, layers: int) -> int:
    """Return the number of layers after which the patterns of the layers repeat."""
    sequence = [pattern.layer_pattern(layer) for layer in range(layers)]
    return next(n for n in range(1, layers + 1) if all(a == b for a, b in zip(sequence, sequence[n:])))


def _edges(pattern: Pattern, context: Context, heads: int) -> Tensor:
    """Return whether a query reads a key in a layer, by any head or the residual connection, [T, T] bool."""
    index = torch.arange(context.q_len)
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.arange(heads).view(1, -1, 1, 1)
    mask = restricted(pattern, context).mask(context, b, h, index.view(-1, 1), index)
    return mask.view(-1, *mask.shape[-2:]).any(0) | torch.eye(context.q_len, dtype=torch.bool)
