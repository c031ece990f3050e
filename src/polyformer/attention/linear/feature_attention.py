"""Attention by features, in linear time: the sums over keys are made once, or pass from token to token.

    y_i = sum_j w_ij (phi(q_i) . phi(k_j)) v_j / sum_j w_ij (phi(q_i) . phi(k_j))
    w_ij = exp(weight_j + decay_(j+1) + ... + decay_i)        over the keys j that query i sees

One token after the other it is the recurrence S = e^decay S + e^weight v phi(k)^T, z = e^decay z +
e^weight phi(k), y = S phi(q) / (z . phi(q)). Weights are kept relative to the greatest so far, a maximum
that moves with the tokens and is undone exactly: it knows neither the future nor padding, which has no weight
at all. Documents in one row are computed one after another.

Katharopoulos et al. 2020, section 3. Cost: 2 M (D + 2 Dv) products a token and head, and half a run's M + Dv
where causal; the state has M (Dv + 1) numbers for a head, however many tokens it has seen.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.linear.scan import Causal, Past, Whole, absorb_token, bounded, empty
from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.dot_product.attend import prepare
from polyformer.dot_product.request import indices
from polyformer.ops.random_features import Kernel
from polyformer.ops.softmax import record, recording
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class LinearState(State):
    """Sums [B, H, Dv, M] and norms [B, H, M], both times e^-top; top and mass [B, H]. None before a token."""

    sums: Tensor | None = None
    norms: Tensor | None = None
    top: Tensor | None = None
    mass: Tensor | None = None

    def past(self, rows: int, heads: int, width: int, kernel: Kernel) -> Past:
        """As the computation takes it, all heads of all rows in one axis."""
        if self.sums is None or self.norms is None or self.top is None or self.mass is None:
            return empty(rows * heads, width, kernel)
        return Past(*(x.flatten(0, 1) for x in (self.sums, self.norms, self.top, self.mass)))


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """q [B, H, Tq, D], k [B, H, T, D] and v [B, H, T, Dv] of the new keys; log weight and decay [B, H, T].

    The precision is that of `kernel.directions`. `floor` in the kernel: denominators count as no less than
    this share of what they would be if every phi(q) . phi(k) were 1, since features that can be negative
    may estimate one near 0; a numerator over such a floor is small.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kernel: Kernel
    weight: Tensor
    decay: Tensor | None
    causal: bool
    offset: int  # the slot of the first query among these keys


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Kernel,
    context: Context,
    state: State | None = None,
    weight: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, LinearState | None]:
    """Output [B, H, Tq, Dv] in the precision of the kernel, and the next state where one was given.

    q [B, H, Tq, D] and the keys and values after those of the state, k [B, Hkv, T, D], v [B, Hkv, T, Dv].
    weight, decay: [B, H, T] log weights of the keys, and log decays before each token (causal alone).
    """
    assert isinstance(state, LinearState | None)
    with torch.autocast(q.device.type, enabled=False):
        call = _prepared(q, k, v, kernel, context, weight, decay)
        if recording():
            return _dense(call, context, state), None
        rows, heads = q.shape[:2]
        past = (state or LinearState()).past(rows, heads, v.shape[3], kernel)
        if context.q_doc is None or context.kv_doc is None:
            out, past = _flat(call, past)
        elif call.causal:
            out, past = _documents_causal(call, context.kv_doc, context.kv_len - k.shape[2], past)
        else:
            out = _documents_whole(call, context.q_doc, context.kv_doc, past)
        if state is None:
            return out, None
        return out, LinearState(*(x.unflatten(0, (rows, heads)) for x in past))


def exact(x: Tensor) -> Tensor:
    """float16 and bfloat16 in float32: features are computed in no less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Kernel,
    context: Context,
    weight: Tensor | None = None,
    decay: Tensor | None = None,
) -> Tensor:
    """The equation with all its pairs; the keys are all that the context describes."""
    with torch.autocast(q.device.type, enabled=False):
        return _dense(_prepared(q, k, v, kernel, context, weight, decay), context, None)


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Kernel,
    context: Context,
    weight: Tensor | None,
    decay: Tensor | None,
) -> Call:
    q, k, v = (x.to(kernel.directions.dtype) for x in (q, k, v))
    groups, new = q.shape[1] // k.shape[1], k.shape[2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if weight is None:
        weight = k.new_zeros(k.shape[:3])
    if context.kv_valid is not None:
        real = context.kv_valid[:, -new:].unsqueeze(1)
        weight = weight.masked_fill(~real, -torch.inf)
        decay = None if decay is None else decay * real
    if not context.causal:
        decay = None
    return Call(q, k, v, kernel, weight, decay, context.causal, context.offset - (context.kv_len - new))


def _dense(call: Call, context: Context, state: LinearState | None) -> Tensor:
    if state is not None and state.sums is not None:
        raise InputError(
            "output_attentions: a state of sums has no weights of single tokens; give the whole input at once"
        )
    (of_q, _), (of_k, scale) = call.kernel.features(call.q), call.kernel.features(call.k)
    weight = (call.weight + scale).unsqueeze(-2)
    if call.decay is not None:
        faded = call.decay.cumsum(-1)
        last = slice(call.offset, call.offset + call.q.shape[2])
        weight = weight + faded[..., last].unsqueeze(-1) - faded.unsqueeze(-2)
    request = prepare(
        call.q, call.k, call.v, pattern=None, score_mod=None, context=context, scale=1.0, dropout=0.0
    )
    if request.pattern is not None:
        weight = weight.masked_fill(~request.pattern.mask(context, *indices(request)), -torch.inf)
    top = weight.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).min)
    shares = (weight - top).exp()
    scores = of_q @ of_k.mT * shares
    total = bounded(scores.sum(-1, keepdim=True), shares.sum(-1, keepdim=True), call.kernel.floor)
    weights = scores / total
    record(weights)
    return weights @ call.v


def _flat(call: Call, past: Past) -> tuple[Tensor, Past]:
    """One document a row: all heads of all rows in one axis."""
    rows, heads, queries = call.q.shape[:3]
    last = call.offset + queries
    keep = slice(0, last) if call.causal else slice(None)
    k, v, weight = (x[:, :, keep].flatten(0, 1) for x in (call.k, call.v, call.weight))
    decay = None if call.decay is None else call.decay[:, :, keep].flatten(0, 1)
    q = call.q.flatten(0, 1)
    if not call.causal:
        out = Whole.apply(call.kernel, q, k, v, weight)
    elif queries == last == 1:
        out, past = absorb_token(call.kernel, q, k, v, weight, decay, past)
    else:
        # Keys before the first query: queries of nothing, which are thrown away, make both as long.
        q = torch.nn.functional.pad(q, (0, 0, call.offset, 0))
        graph = torch.is_grad_enabled()
        out, *after = Causal.apply(call.kernel, graph, q, k, v, weight, decay, *past)
        out, past = out[:, call.offset :], Past(*after)
    return out.unflatten(0, (rows, heads)), past


def _part(call: Call, row: int, queries: slice, keys: slice, offset: int) -> Call:
    """Some queries and keys of one row."""

    def cut(x: Tensor, at: slice) -> Tensor:
        return x[row : row + 1, :, at]

    decay = None if call.decay is None else cut(call.decay, keys)
    return dataclasses.replace(
        call,
        q=cut(call.q, queries),
        k=cut(call.k, keys),
        v=cut(call.v, keys),
        decay=decay,
        weight=cut(call.weight, keys),
        offset=offset,
    )


def _documents_causal(call: Call, documents: Tensor, before: int, past: Past) -> tuple[Tensor, Past]:
    """A query sees its own document alone; the past, `before` tokens, goes on where its document does."""
    rows, heads, queries = call.q.shape[:3]
    goes_on = documents.new_ones(rows, dtype=torch.bool)
    if before:
        goes_on = documents[:, before - 1] == documents[:, before]
    fresh = empty(rows * heads, call.v.shape[3], call.kernel)
    same = goes_on.repeat_interleave(heads)
    past = Past(*(torch.where(same.view(-1, *[1] * (x.dim() - 1)), x, y) for x, y in zip(past, fresh)))
    if call.k.shape[2] == 1:
        return _flat(call, past)
    outs, pasts = [], []
    for row, numbers in enumerate(documents[:, before:].tolist()):
        own = Past(*(x[row * heads : (row + 1) * heads] for x in past))
        found = []
        for index, (start, stop) in enumerate(_spans(numbers)):
            first, last = (min(max(edge - call.offset, 0), queries) for edge in (start, stop))
            if first == last:
                continue
            offset = max(call.offset - start, 0)
            if index:
                own = empty(heads, call.v.shape[3], call.kernel)
            part = _part(call, row, slice(first, last), slice(start, stop), offset)
            out, own = _flat(part, own)
            found.append(out)
        outs.append(torch.cat(found, 2))
        pasts.append(own)
    return torch.cat(outs), Past(*(torch.cat(x) for x in zip(*pasts)))


def _documents_whole(call: Call, q_doc: Tensor, kv_doc: Tensor, past: Past) -> Tensor:
    """Every query sees its own document."""
    outs = []
    for row, (asking, told) in enumerate(zip(q_doc.tolist(), kv_doc.tolist())):
        keys = {told[start]: slice(start, stop) for start, stop in _spans(told)}
        parts = [
            _part(call, row, slice(start, stop), keys.get(asking[start], slice(0, 0)), 0)
            for start, stop in _spans(asking)
        ]
        outs.append(torch.cat([_flat(part, past)[0] for part in parts], 2))
    return torch.cat(outs)


def _spans(numbers: list[int]) -> list[tuple[int, int]]:
    """Where each run of equal numbers starts and stops."""
    edges = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]]
    return list(zip([0, *edges], [*edges, len(numbers)]))
