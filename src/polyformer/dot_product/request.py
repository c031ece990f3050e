"""One attention call, checked and completed: what every backend receives."""

import dataclasses

import torch
from torch import Tensor
from torch.autograd import forward_ad

from polyformer.core.errors import InputError
from polyformer.dot_product.relative import Relative
from polyformer.patterns.base import Pattern, ScoreMod
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """Inputs of one call of `attend`, for a backend.

    Args:
        q: [B, H, Tq, D]; k: [B, Hkv, Tk, D]; v: [B, Hkv, Tk, Dv]; H is a multiple of Hkv.
        pattern: everything that limits who sees whom, the context's own limits included; None for all.
        relative: terms by distance, added to the scores before `score_mod`, and to the values.
        score_mod: applied to the scaled scores.
        scale: the factor on q k^T.
        dropout: probability that an attention weight is dropped.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    context: Context
    pattern: Pattern | None
    relative: Relative | None
    score_mod: ScoreMod | None
    scale: float
    dropout: float

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def pairs(self) -> int:
        """Scores that a dense computation would hold."""
        return self.q.shape[0] * self.q.shape[1] * self.context.q_len * self.context.kv_len

    def whole_score_mod(self, context: Context) -> ScoreMod | None:
        """`score_mod` with the relative terms in it, for a backend that knows functions of scores alone."""
        if self.relative is None:
            return self.score_mod
        k = self.k.repeat_interleave(self.groups, dim=1)
        first, then = self.relative.score_mod(self.q, k, self.scale, context), self.score_mod
        if then is None:
            return first
        return lambda score, *place: then(first(score, *place), *place)


def transformed() -> bool:
    """Whether a transform of `torch.func`, or forward differentiation, is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def check(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    """Raises `InputError` unless the shapes, types and devices of one call fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise InputError(
                f"{name}: expected 4 axes [batch, heads, length, width], got {tuple(tensor.shape)}"
            )
    if not (q.dtype == k.dtype == v.dtype):
        raise InputError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them first")
    if not q.is_floating_point():
        raise InputError(f"q, k, v: expected a floating dtype, got {q.dtype}")
    if not (q.device == k.device == v.device):
        raise InputError(f"q, k, v: expected one device, got {q.device}, {k.device}, {v.device}")
    if k.shape[:3] != v.shape[:3]:
        raise InputError(
            f"k, v: expected the same batch, heads and length, got {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(f"q, k: expected the same batch and width, got {tuple(q.shape)}, {tuple(k.shape)}")
    if q.shape[3] == 0:
        raise InputError(f"q, k: expected a width of 1 or more, got {tuple(q.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(f"k: expected a number of heads that divides {q.shape[1]}, got {k.shape[1]}")
    if not 0.0 <= dropout < 1.0:
        raise InputError(f"dropout: expected a probability in [0, 1), got {dropout}")


def indices(request: Request) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Broadcast indices b [B,1,1,1], h [1,H,1,1], q [Tq,1], kv [Tk] of the dense score tensor."""
    device = request.q.device
    b = torch.arange(request.q.shape[0], device=device).view(-1, 1, 1, 1)
    h = torch.arange(request.q.shape[1], device=device).view(1, -1, 1, 1)
    q_idx = torch.arange(request.context.q_len, device=device).view(-1, 1)
    return b, h, q_idx, torch.arange(request.context.kv_len, device=device)
