"""Recurrences by the Triton kernels of flash-linear-attention, on a GPU.

    decay         erase    many tokens               few tokens without gradients
    per head      none     chunk_simple_gla          fused_recurrent_simple_gla
    per channel   none     chunk_gla                 fused_recurrent_gla
    per head      b        chunk_gated_delta_rule    fused_recurrent_gated_delta_rule
    per channel   b        chunk_kda                 fused_recurrent_kda

A scan without a decay has the decay 0 per head. (`chunk_delta_rule` is not used: it refuses float32, and its
results were wrong on Hopper, flash-linear-attention #984.) Queries and keys are repeated for every head,
since `chunk_simple_gla` returns fewer heads, without an error, if there are fewer of them. Documents are
joined into one row, with the places where they begin.

`refusal` says why a call cannot use the kernels; it then runs `chunked_scan`. The kernels accumulate in
float32 and read queries, keys and values in the model's type. Yang and Zhang 2024, flash-linear-attention.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyformer.attention.functional.request import is_ordinary
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs, chunked_scan, recurrence
from polyformer.core.ops.autograd import mark_first_order

Scan = Callable[[ScanInputs, Tensor], tuple[Tensor, Tensor]]
"""A function like `recurrence`."""

WIDEST = 256
"""The largest width of a key for which the kernels have a block."""

FEW = 16
"""Up to this number of tokens a kernel that goes from token to token is faster than chunks."""

HOPPER, BLACKWELL = 9, (10, 12)
"""Major compute capabilities."""

BROKEN = (3, 4), (3, 7, 1)
"""The first Triton with wrong gradients of the delta rule on Hopper, and the first without (#640)."""


class Rule(NamedTuple):
    """The kernels for a kind of scan, and the name of the argument with its decays."""

    module: str
    name: str
    decay: str


RULES = {  # by whether decays are per channel, and whether the delta rule applies
    (False, False): Rule("fla.ops.simple_gla", "simple_gla", "g"),
    (True, False): Rule("fla.ops.gla", "gla", "g"),
    (False, True): Rule("fla.ops.gated_delta_rule", "gated_delta_rule", "g"),
    (True, True): Rule("fla.ops.kda", "kda", "g"),
}


def rule(tokens: ScanInputs) -> Rule:
    """Return the kernels that compute a scan."""
    by_channel = tokens.decay is not None and tokens.decay.shape[-1] > 1
    return RULES[by_channel, tokens.erase is not None]


def refusal(tokens: ScanInputs) -> str | None:
    """Return why the kernels do not compute a scan; None if they do."""
    q = tokens.q
    if not q.is_cuda:
        return f"the kernels of flash-linear-attention are for GPUs, and the tensors are on {q.device.type}"
    if (missing := missing_package()) is not None:
        return f"{missing} is not installed (pip install polyformer[gpu])"
    if q.dtype == torch.float64:
        return "float64: the kernels accumulate in float32"
    if q.shape[-1] > WIDEST:
        return f"keys of {q.shape[-1]} numbers: the kernels have blocks for {WIDEST}"
    if not is_ordinary():
        return "a compiler, a tracer or a transform looks into the call"
    return _faulty(tokens)


def _faulty(tokens: ScanInputs) -> str | None:
    """Return the fault of the kernels on this GPU, if any, that a call would meet."""
    if tokens.erase is None or not builds_graph(tokens):
        return None
    major = capability(tokens.q.device)
    if major in BLACKWELL:
        return "gradients of the delta rule can be NaN on Blackwell (flash-linear-attention #913)"
    broken = BROKEN[0] <= triton_version() < BROKEN[1]
    if major == HOPPER and broken and importlib.util.find_spec("tilelang") is None:
        return (
            "gradients of the delta rule are wrong on Hopper with Triton 3.4 to 3.7.0 "
            "(flash-linear-attention #640); install tilelang or another Triton"
        )
    return None


@functools.cache
def missing_package() -> str | None:
    """Return the first package that the kernels need and that is not installed."""
    names = {"triton": "triton", "einops": "einops", "fla": "fla-core"}
    return next((package for name, package in names.items() if importlib.util.find_spec(name) is None), None)


@functools.cache
def capability(device: torch.device) -> int:
    """Return the major compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def triton_version() -> tuple[int, ...]:
    """Return the version of Triton as numbers."""
    version: str = importlib.import_module("triton").__version__
    numbers = version.split("+")[0].split(".")[:3]
    return tuple(int(number) for number in numbers if number.isdigit())


def builds_graph(tokens: ScanInputs) -> bool:
    """Return whether a scan is part of a graph for gradients."""
    tables = tokens.q, tokens.k, tokens.v, tokens.decay, tokens.erase
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tables)


def chosen_scan(backend: str, tokens: ScanInputs, dtype: torch.dtype) -> Scan:
    """Return the function that computes a scan: the definition, chunks in torch, or the kernels.

    backend: the option of a recurrence. dtype: of the model's tensors.
    """
    if backend == "definition":
        return recurrence
    if backend == "chunks" or refusal(tokens) is not None:
        return chunked_scan
    return functools.partial(fused_scan, dtype=dtype)


def explained(backend: str, tokens: ScanInputs) -> str:
    """Return the name of the function that computes a scan, and the reason."""
    if backend != "auto":
        return f"{backend}: asked for by the option backend"
    why = refusal(tokens)
    return f"flash-linear-attention's {rule(tokens).name}" if why is None else f"chunks in torch: {why}"


def fused_scan(tokens: ScanInputs, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, Dv] and the last state [B, H, D, Dv] in float32, as `recurrence` does.

    dtype: of the queries, keys and values that the kernels read. Gradients are of first order.
    """
    chosen, tokens = rule(tokens), tokens.by_heads()
    batch, length = tokens.q.shape[0], tokens.q.shape[2]
    steps = length <= FEW and not builds_graph(tokens)
    kernel = getattr(importlib.import_module(chosen.module), _name(chosen, steps))
    call = _arguments(tokens, chosen, steps, dtype)
    state = state.float()
    rows = None
    if tokens.starts is not None:
        bounds, first, rows = documents(tokens.starts)
        call = {name: x.flatten(0, 1).unsqueeze(0) for name, x in call.items()}
        # Only the first document of a row may continue from the state.
        begin = state.new_zeros(len(bounds) - 1, *state.shape[1:])
        goes_on = ~tokens.starts[:, 0].view(-1, 1, 1, 1)
        state = begin.index_copy(0, first, state * goes_on)
        call["cu_seqlens"] = bounds
    y, after = kernel(**call, scale=1.0, initial_state=state, output_final_state=True)
    mark_first_order(y, "flash-linear-attention's kernel")
    if rows is not None:
        after = after[rows]
    y = y.reshape(batch, length, *y.shape[2:]).transpose(1, 2)
    return y.float(), after


def _name(chosen: Rule, steps: bool) -> str:
    return f"fused_recurrent_{chosen.name}" if steps else f"chunk_{chosen.name}"


def _arguments(tokens: ScanInputs, chosen: Rule, steps: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tokens by the names of a kernel's arguments, [B, T, H, ...]."""
    tables = {"q": tokens.q, "k": tokens.k, "v": tokens.v}
    call = {name: x.transpose(1, 2).to(dtype).contiguous() for name, x in tables.items()}
    decay = tokens.v.new_zeros(*tokens.v.shape[:3], 1) if tokens.decay is None else tokens.decay
    by_channel = decay.shape[-1] > 1
    decay = decay.transpose(1, 2).float()
    name = "gk" if steps and chosen.name == "gla" else chosen.decay
    call[name] = (decay if by_channel else decay.squeeze(-1)).contiguous()
    if tokens.erase is not None:
        call["beta"] = tokens.erase.transpose(1, 2).squeeze(-1).to(dtype).contiguous()
    return call


def documents(starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the documents of rows, one behind another, begin and end.

    starts: [B, T], whether a token starts a document. Returns the bounds [N + 1] of N documents, and the
    numbers [B] of the first and of the last document of each row.
    """
    batch, length = starts.shape
    begins = starts.clone()
    begins[:, 0] = True
    places = begins.flatten().nonzero().squeeze(1)
    bounds = torch.cat([places, places.new_full((1,), batch * length)])
    last = begins.sum(1).cumsum(0) - 1
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    return bounds, first, last
