"""What every head loses by every pattern, measured on a text in one pass forward and one backward.

`candidates` are the patterns that a head may get.

With the weights p_ij of a head and its values v_j, a pattern with the keys S_i keeps the mass m_i and changes
the output of the head:

    m_i = sum_{j in S_i} p_ij,    d_i = sum_{j in S_i} p_ij v_j / m_i - sum_j p_ij v_j

The gradient g_i of the loss with respect to the head's output includes the output projection and all later
layers. The error of a pattern estimates the squared change of the loss, token by token:

    sum_i (g_i . d_i)^2 + |g_i|^2 |d_i|^2 / D

The first term is the Fisher matrix of each token from a single gradient. The second is its mean over all
directions, which reduces the noise of the first. On SmolLM2 both together choose better than either of them,
and much better than the lost mass.

The weights are exact. They are computed for `RUNS` runs of `WIDTH` queries, spread over the text, and for
the copies that end a decoder's text (`with_copies`), from queries and keys that the pass leaves, so memory
does not grow with the square of the length.

A decoder's text ends with copies of its earlier spans. The loss of plain text hardly depends on far tokens,
so heads that retrieve look useless in it. A copied span can only be predicted from the span, any distance
before it. DuoAttention (Xiao et al. 2024) tells such heads apart by synthetic passkeys; copies of the text
itself need no language and no template.

The outputs of many patterns come from the same weights, each from the largest pattern that it contains.
With the keys S of a pattern and B, a subset of S, the keys of another,

    sum_{j in S} p_ij v_j = sum_{j in B} p_ij v_j + sum_{j in S - B} p_ij v_j

so windows of many widths cost little more than the widest. Nothing is subtracted, so nothing cancels.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.attention.functional.backends.definition import ExactWeights
from polyformer.attention.functional.request import Request, observed
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import BlockWindow, Full, Global, Pattern, Random, Strided, Window
from polyformer.attention.patterns.implied import restricted
from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.nn.stack import Stack

WINDOWS = 512, 128, 64, 32, 21, 16, 11, 8, 5, 4, 3, 2
"""Windows, as parts of the length: a 512th to a half."""

SINKS = 4
"""First tokens that trained models use as attention sinks."""

BLOCK = 64
"""Positions of a block of the patterns of blocks."""

ROWS = 128
"""Queries with a mask in memory."""


def candidates(length: int) -> list[Pattern]:
    """Return the default patterns for texts of `length` tokens, all keys included.

    Windows with and without first tokens, strides, windows of blocks with random blocks, and sinks with the
    nearest tokens only.
    """
    near = sorted({max(1, length // part) for part in WINDOWS})
    patterns: list[Pattern] = [Window(4) | Global(SINKS)]
    for width in near:
        patterns += [Window(width), Window(width) | Global(SINKS)]
    # The square root of the length is the cheapest stride; an eighth of it reads more keys.
    for stride in sorted({max(2, int(length**0.5) // part) for part in (1, 4)}):
        patterns += [Strided(stride), Window(2 * stride) | Strided(stride) | Global(SINKS)]
    if length >= 8 * BLOCK:
        patterns += [BlockWindow(BLOCK) | Random(number, BLOCK) | Global(SINKS) for number in (3, 8)]
    return [*dict.fromkeys(patterns), Full()]


def pair_masks(pattern: Pattern, context: Context, rows: Tensor) -> Tensor:
    """Return whether the queries `rows` [R] see each key of a text, with the context's limits: [R, Tk]."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    mask = restricted(pattern, context).mask(
        context, zero, zero, rows.view(-1, 1), torch.arange(context.kv_len)
    )
    return mask.reshape(len(rows), context.kv_len)


def pair_counts(patterns: Sequence[Pattern], context: Context) -> Tensor:
    """Return the exact number of query-key pairs of a head with each pattern, int64 [C]."""
    return torch.tensor([sum(_counts(pattern, context)) for pattern in patterns])


def _counts(pattern: Pattern, context: Context) -> Iterator[int]:
    for rows in torch.arange(context.q_len).split(ROWS):
        yield int(pair_masks(pattern, context, rows).sum())


SPAN = 32
"""Tokens of a copy."""

CUE = 8
"""First tokens of a copy, without labels: they name the span, and nothing predicts them."""

MOST = 16
"""The most copies in a text."""


@dataclasses.dataclass(frozen=True)
class TextWithCopies:
    """Token ids, which are copies of earlier ones from `start` on, and their labels for a decoder."""

    ids: list[int]
    labels: list[int]
    start: int


def number_of_copies(length: int) -> int:
    """Return the number of copies for a text of `length` tokens, at most an eighth of it."""
    return min(MOST, length // (8 * SPAN))


def with_copies(ids: Sequence[int], copies: int) -> TextWithCopies:
    """Return `ids` with the last tokens replaced by `copies` copies of spans, spread over the tokens before.

    The copies are in a random order, the same for all texts, so that their distances vary.
    """
    start = len(ids) - copies * SPAN
    order = torch.randperm(copies, generator=torch.Generator().manual_seed(0)).tolist()
    text = list(ids[:start])
    labels = [*text]
    for number in order:
        first = (2 * number + 1) * (start - SPAN) // (2 * copies)
        span = ids[first : first + SPAN]
        text += span
        labels += [*[IGNORED] * CUE, *span[CUE:]]
    return TextWithCopies(text, labels, start)


@dataclasses.dataclass(frozen=True)
class QueryRun:
    """The queries start <= i < stop, each for `weight` queries of the text."""

    start: int
    stop: int
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class NestedStep:
    """The keys [K] that a pattern adds to the keys of `base`, and the queries that see them, `mask` [R, K].

    base: an index into the list of patterns; None for no keys.
    """

    base: int | None
    keys: Tensor
    mask: Tensor


def nested_steps(
    patterns: Sequence[Pattern], context: Context, runs: Sequence[QueryRun]
) -> list[list[NestedStep]]:
    """Return the step of each pattern in every run."""
    return [
        _steps([pair_masks(pattern, context, torch.arange(run.start, run.stop)) for pattern in patterns])
        for run in runs
    ]


def _steps(masks: Sequence[Tensor]) -> list[NestedStep]:
    """Return the step of each mask [R, K] from the largest earlier mask that it contains."""
    sizes, steps = [int(mask.sum()) for mask in masks], list[NestedStep]()
    for number, mask in enumerate(masks):
        base, rest = None, mask
        for other in sorted(range(number), key=lambda index: -sizes[index]):
            if not bool((masks[other] & ~mask).any()):
                base, rest = other, mask & ~masks[other]
                break
        keys = rest.any(0).nonzero().flatten()
        steps.append(NestedStep(base, keys, rest[:, keys]))
    return steps


def nested_outputs(weights: Tensor, v: Tensor, steps: Sequence[NestedStep]) -> list[tuple[Tensor, Tensor]]:
    """Return the output [H, R, D] and mass [H, R] of each pattern; weights: [H, R, K], v: [H, K, D]."""
    sums = list[tuple[Tensor, Tensor]]()
    for step in steps:
        keys = step.keys.to(v.device)
        kept = weights[..., keys] * step.mask.to(v.device)
        output, mass = kept @ v[:, keys], kept.sum(-1)
        if step.base is not None:
            output, mass = output + sums[step.base][0], mass + sums[step.base][1]
        sums.append((output, mass))
    return [(x / mass.clamp_min(torch.finfo(mass.dtype).tiny).unsqueeze(-1), mass) for x, mass in sums]


RUNS, WIDTH = 32, 16
"""The queries of a text with computed weights: runs, and queries in each."""


@dataclasses.dataclass(frozen=True, eq=False)
class HeadErrors:
    """The measurements of C patterns, for each layer and head.

    costs: [C], query-key pairs of a head. errors: [L, H, C], the sums of squared changes of the loss.
    lost: [L, H, C], the mean share of the attention mass that the pattern drops.
    """

    patterns: tuple[Pattern, ...]
    costs: Tensor
    errors: Tensor
    lost: Tensor


def head_errors(model: Transformer, rows: Sequence[Sequence[int]], patterns: Sequence[Pattern]) -> HeadErrors:
    """Measure `patterns` on texts, token ids `rows` of one length.

    The loss of a model without next-token prediction is a random projection of its output.

    Raises:
        InputError: the model has an encoder and a decoder, or a layer without dense softmax attention.
    """
    stack = _stack(model)
    length, layers = len(rows[0]), len(stack.layers)
    context = Context(length, length, causal=model.decoder is not None)
    copies = number_of_copies(length) if model.head.predicts_next else 0
    texts = [with_copies(row, copies) for row in rows]
    measure = _Measurement(patterns, context, query_runs(length, texts[0].start), layers)
    with _differentiable(model, stack), measure.hooked(stack), torch.enable_grad(), observed() as requests:
        measure.requests = requests
        for text in texts:
            _loss(model, text).backward()
    seen = sum(run.weight * (run.stop - run.start) for run in measure.runs) * len(rows)
    errors, lost = torch.stack(measure.errors), torch.stack(measure.lost) / seen
    return HeadErrors(tuple(patterns), pair_counts(patterns, context), errors, lost)


def query_runs(length: int, start: int) -> list[QueryRun]:
    """Return runs of queries spread over a text, and all queries of the copies from `start` on.

    All copies together weigh as much as the rest of the text. Up to 512 other queries are all measured. Their
    first and last run count once, because the output may be read from the first or the last token only.
    """
    weight = start / max(1, length - start)
    copied = [QueryRun(i, min(i + WIDTH, length), weight) for i in range(start, length, WIDTH)]
    if start <= RUNS * WIDTH:
        return [QueryRun(i, min(i + WIDTH, start)) for i in range(0, start, WIDTH)] + copied
    weight = (start - 2 * WIDTH) / ((RUNS - 2) * WIDTH)
    starts = [number * (start - WIDTH) // (RUNS - 1) for number in range(RUNS)]
    inner = [QueryRun(i, i + WIDTH, weight) for i in starts[1:-1]]
    return [QueryRun(0, WIDTH), *inner, QueryRun(starts[-1], start), *copied]


class _Measurement:
    """The sums over texts of what each layer measures in the backward pass."""

    def __init__(self, patterns: Sequence[Pattern], context: Context, runs: Sequence[QueryRun], layers: int):
        self.runs = runs
        self.steps = nested_steps(patterns, context, runs)
        self.errors: list[Any] = [0.0] * layers
        self.lost: list[Any] = [0.0] * layers
        self.requests: list[Request] = []

    @contextlib.contextmanager
    def hooked(self, stack: Stack) -> Iterator[None]:
        """Measure every layer when the gradient of its heads is known."""
        handles = [
            mechanism.register_forward_hook(self._hook(index))
            for index, mechanism in enumerate(_mechanisms(stack))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: tuple[Tensor, Any]) -> None:
            # The last request is the layer's own. With checkpointing each layer runs twice.
            request = self.requests[-1]
            self.requests.clear()
            if output[0].requires_grad:
                output[0].register_hook(lambda gradient: self._add(layer, request, gradient))

        return hook

    def _add(self, layer: int, request: Request, gradient: Tensor) -> None:
        """Add the measurements of one text to the sums of a layer; gradient: [1, H, T, D]."""
        weights, v = ExactWeights(request), request.v[0].detach().repeat_interleave(request.groups, 0).float()
        errors = torch.zeros(len(v), len(self.steps[0]), dtype=torch.float64)
        lost = torch.zeros_like(errors)
        for run, steps in zip(self.runs, self.steps):
            # A dense layer reads the keys from the first on, so a key is its own column.
            tile = weights.tile(run.start, run.stop).weights
            g = gradient[0, :, run.start : run.stop].float()
            dense = tile @ v[:, : tile.shape[-1]]
            for number, (outputs, mass) in enumerate(nested_outputs(tile, v, steps)):
                errors[:, number] += run.weight * _squared_changes(outputs - dense, g).sum(-1).cpu()
                lost[:, number] += run.weight * (1 - mass.double()).sum(-1).cpu()
        self.errors[layer], self.lost[layer] = self.errors[layer] + errors, self.lost[layer] + lost


def _squared_changes(d: Tensor, g: Tensor) -> Tensor:
    """Return (g . d)^2 + |g|^2 |d|^2 / D for d and g [H, R, D]: [H, R], float64."""
    along, sizes = (d * g).sum(-1).double(), d.double().square().sum(-1) * g.double().square().sum(-1)
    return along.square() + sizes / d.shape[-1]


def _stack(model: Transformer) -> Stack:
    """Return the only stack of the model, if all its layers have dense softmax attention."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    if len(stacks) != 1:
        raise InputError("model: expected an encoder or a decoder, got both")
    for index, mechanism in enumerate(_mechanisms(stacks[0])):
        config = getattr(mechanism, "config", None)
        if not isinstance(config, SoftmaxConfig) or config.sink or not _is_dense(config.pattern, index):
            raise InputError(
                f"model: expected dense softmax attention without a learned sink in every layer, but layer "
                f"{index} has another attention; fit the original model"
            )
    return stacks[0]


def _mechanisms(stack: Stack) -> list[nn.Module]:
    attentions: list[Any] = [layer.attention for layer in stack.layers]
    return [attention.mechanism for attention in attentions]


def _is_dense(pattern: Pattern | None, layer: int) -> bool:
    return pattern is None or isinstance(pattern.layer_pattern(layer), Full)


def _loss(model: Transformer, text: TextWithCopies) -> Tensor:
    """Return the sum of the losses of all labelled tokens, or the same random projection of the outputs."""
    device = next(model.parameters()).device
    ids, labels = torch.tensor([text.ids], device=device), torch.tensor([text.labels], device=device)
    if model.head.predicts_next:
        loss = model(ids, labels=labels).loss
        assert loss is not None
        return loss * (labels != IGNORED).sum()
    outputs = model(ids).logits
    # The square of g . d is then, on average, the squared change of the output vector.
    directions = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0))
    return (outputs * directions.to(outputs)).sum()


@contextlib.contextmanager
def _differentiable(model: Transformer, stack: Stack) -> Iterator[None]:
    """Compute gradients of activations only, layer by layer, without dropout, in the context."""
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training, recompute = model.training, stack.recompute
    model.eval().requires_grad_(False)
    # Checkpointing looks at the stack's own mode; the layers inside have no dropout in evaluation mode.
    stack.training = stack.recompute = not stack.layerdrop
    first = stack.layers[0].register_forward_pre_hook(lambda layer, arguments: _require(arguments[0]))
    try:
        yield
    finally:
        first.remove()
        model.train(training)
        stack.recompute = recompute
        for parameter, value in required:
            parameter.requires_grad_(value)


def _require(x: Tensor) -> None:
    if not x.requires_grad:
        x.requires_grad_()
