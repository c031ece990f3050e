"""Forgetting attention by flash-linear-attention's Triton kernel, on a GPU.

    p_ij = softmax_j(q_i . k_j / sqrt(D) + sum_(j < l <= i) log f_l),  j <= i

The kernel `parallel_forgetting_attn` computes this for whole texts without a mask. It sums the logs of gates
in float32 and skips pairs above the diagonal. Documents are joined into one row, with the places where
they begin. `refusal` says why a call cannot use it. Such a call runs `attend`, where the gates are a function
of the scores. Lin et al. 2025 (Forgetting Transformer), section 3; Yang and Zhang 2024,
flash-linear-attention.
"""

import dataclasses
import importlib

import torch
from torch import Tensor

from polyformer.attention.functional.request import is_ordinary
from polyformer.attention.mechanisms.recurrence.fused_scan import WIDEST, documents, missing_package
from polyformer.core.ops.autograd import mark_first_order
from polyformer.core.sequence.context import Context

KERNEL = "flash-linear-attention's parallel_forgetting_attn"


@dataclasses.dataclass(frozen=True, eq=False)
class GatedCall:
    """A call of forgetting attention.

    q: [B, H, Tq, D]. k, v: [B, Hkv, Tk, D], with the keys of the cache. gates: [B, H, Tk], log f. has_terms:
    whether a position scheme adds terms to the scores. dropout: of the weights.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor
    context: Context
    has_terms: bool = False
    dropout: float = 0.0


def refusal(call: GatedCall) -> str | None:
    """Return why the kernel does not compute a call; None if it does."""
    q, context = call.q, call.context
    if not q.is_cuda:
        return f"the kernels of flash-linear-attention are for GPUs, and the tensors are on {q.device.type}"
    if (missing := missing_package()) is not None:
        return f"{missing} is not installed (pip install polyformer[gpu])"
    if q.dtype == torch.float64:
        return "float64: the kernel accumulates in float32"
    if max(q.shape[-1], call.v.shape[-1]) > WIDEST:
        return f"heads of {max(q.shape[-1], call.v.shape[-1])} numbers: the kernel has blocks for {WIDEST}"
    if not context.causal:
        return "the kernel is causal"
    if context.kv_valid is not None:
        return "the kernel has no mask for padding"
    if context.q_len != context.kv_len or context.shard is not None:
        return "the kernel is for whole texts, and the queries are a part of one"
    if call.has_terms:
        return "positions add terms to the scores"
    if call.dropout:
        return "the kernel has no dropout"
    return None if is_ordinary() else "a compiler, a tracer or a transform looks into the call"


def fused_forgetting(call: GatedCall) -> Tensor:
    """Return the output [B, H, T, D] of a call in the type of its queries. Gradients are of first order."""
    kernel = importlib.import_module("fla.ops.forgetting_attn").parallel_forgetting_attn
    q, k, v = (x.transpose(1, 2).contiguous() for x in (call.q, call.k, call.v))
    gates, bounds = call.gates.transpose(1, 2).float().contiguous(), None
    doc = call.context.kv_doc
    if doc is not None:
        starts = doc.expand(len(q), -1).diff(dim=1, prepend=doc[:, :1].expand(len(q), 1)) != 0
        bounds = documents(starts)[0]
        q, k, v, gates = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, gates))
    y = kernel(q, k, v, gates, cu_seqlens=bounds)
    mark_first_order(y, "flash-linear-attention's kernel")
    return y.reshape(len(call.q), -1, *y.shape[2:]).transpose(1, 2)


def explained(backend: str, call: GatedCall) -> str:
    """Return what computes a call, and the reason."""
    if backend != "auto":
        return f"attend: asked for by the option backend={backend!r}"
    why = refusal(call)
    return KERNEL if why is None else f"attend: {why}"
