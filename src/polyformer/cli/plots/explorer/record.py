"""The calls of attention in one forward pass of a model, recorded by hooks without effect on its numbers.

Attention within windows of an image (Swin) has the rows of a layer's batch combined into one call.
A layer of Swin may shift its grid of patches by half a window, cuts it into windows of w x w patches and
attends within each, with a window per row of its batch. Here the patches are in raster order, and a query
sees the keys of its window. Each stage has a separate grid with patches that are twice as large.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.attention.functional.request import Request, observed
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.mechanisms.softmax_attention import SoftmaxAttention, SoftmaxConfig
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.composition import as_pattern
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import chain_score_mods, step, steps_of
from polyformer.cli.plots.explorer.calls import Call
from polyformer.cli.plots.explorer.reading import run_alone
from polyformer.core.errors import InputError
from polyformer.core.instrumentation import Mark, SlotKeys, TokenRecord, collect_marks
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer, VisionTransformer
from polyformer.models.attached.attention_layers import Layer, attention_layers, uses_attention_interface
from polyformer.nn.depth.base import recorded_depths
from polyformer.nn.stack.global_projections import GLOBAL

Grid = tuple[int, int]


class Windows:
    """The attention modules of a model that attend within windows, with the layers that cut these."""

    def __init__(self, model: nn.Module):
        self.layers = {
            part: layer
            for layer in model.modules()
            if hasattr(layer, "cyclic_shift") and hasattr(layer, "maybe_pad")
            for part in layer.children()
            if uses_attention_interface(type(part))
        }
        self.grids: dict[nn.Module, Grid] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Record the grids (rows and columns) of layers that run within the context."""

        def note(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.grids[layer] = named["input_dimensions"] if len(arguments) < 2 else arguments[1]

        with contextlib.ExitStack() as handles:
            for layer in self.layers.values():
                handles.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
            yield

    def stages(self) -> dict[str, Grid]:
        """Return the grids, in order, by the names of their stages."""
        return {f"stage {i + 1}": grid for i, grid in enumerate(dict.fromkeys(self.grids.values()))}

    def names(self, stage: str) -> list[str]:
        """Return the names of a stage's tokens: its patches, and the padding of its grid to whole windows."""
        rows, columns = self.stages()[stage]
        names = [f"row {row} col {column}" for row in range(rows) for column in range(columns)]
        layers = [layer for layer, grid in self.grids.items() if grid == (rows, columns)]
        most = max(slots(layer, (rows, columns)).numel() for layer in layers)
        return [*names, *(f"padding {i + 1}" for i in range(most - len(names)))]

    def call(self, layer: Layer, request: Request) -> Call:
        """Return the call of an attention layer that has a row of the batch for each window."""
        cutting = self.layers[layer.module]
        grid = self.grids[cutting]
        stage = next(name for name, own in self.stages().items() if own == grid)
        places = slots(cutting, grid).to(request.q.device)
        order = places.flatten().argsort()
        window = torch.arange(len(places), device=order.device).repeat_interleave(places.shape[1])[order]
        shift = " moved by half of one" if cutting.shift_size else ""
        size = int(places.shape[1] ** 0.5)
        return Call(
            stage,
            stage,
            layer.index,
            "softmax",
            f"windows of {size} x {size}{shift}",
            request=joined(request, places, order, window),
            marks=[Mark("window", window.view(1, 1, -1))],
        )


def slots(layer: Any, grid: Grid) -> Tensor:
    """Return the raster token at each place of each window, [windows, w w]; padding comes last."""
    rows, columns = grid
    numbers = torch.arange(1, rows * columns + 1).view(1, rows, columns, 1)
    padded, _ = layer.maybe_pad(numbers, rows, columns)
    shifted, size = layer.cyclic_shift(padded)[0, :, :, 0], int(layer.window_size)
    cut = shifted.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1).flatten(1)
    missing = cut == 0
    behind = rows * columns + missing.flatten().cumsum(0).view_as(cut) - 1
    return torch.where(missing, behind, cut - 1)


def joined(request: Request, places: Tensor, order: Tensor, window: Tensor) -> Request:
    """Return a request with one row, in raster order, and the windows as its pattern.

    places: [windows, w w]; order: the index into flattened `places` of each raster token; window: its number.
    """
    inside = order % places.shape[1]

    def flat(x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1, 2)[:, order].unsqueeze(0)

    @broadcasts
    def together(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same = window[q_idx] == window[kv_idx]
        if request.pattern is None:
            return same
        own = request.pattern.mask(request.context, window[q_idx], h, inside[q_idx], inside[kv_idx])
        return same & own

    def of_windows(mod: ScoreMod) -> ScoreMod:
        return broadcasts(
            lambda score, b, h, q_idx, kv_idx: mod(score, window[q_idx], h, inside[q_idx], inside[kv_idx])
        )

    count = len(order)
    return dataclasses.replace(
        request,
        q=flat(request.q),
        k=flat(request.k),
        v=flat(request.v),
        context=Context(count, count, False),
        pattern=as_pattern(together),
        score_mod=chain_score_mods(step(name)(of_windows(mod)) for name, mod in steps_of(request.score_mod)),
    )


IMPLEMENTATION = "polyformer"
"""The implementation in transformers that runs `attend`."""


@torch.no_grad()
def recorded_calls(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Call]:
    """Return every call of attention, in order, while `model` reads `inputs` (one row) in evaluation mode.

    model: a model of polyformer, wrapped for transformers or not, or a model of transformers. Raises
    `InputError` for a model that does not dispatch through `AttentionInterface`.
    """
    training = model.training
    model.eval()
    try:
        kinds = Transformer, VisionTransformer
        own = next((part for part in model.modules() if isinstance(part, kinds)), None)
        return _transformers_calls(model, inputs) if own is None else _polyformer_calls(model, own, inputs)
    finally:
        model.train(training)


def _polyformer_calls(
    model: nn.Module, own: Transformer | VisionTransformer, inputs: Mapping[str, Tensor]
) -> list[Call]:
    calls: list[Call] = []
    feedforwards: list[_FeedForwardHooks] = []
    with contextlib.ExitStack() as stack:
        requests = stack.enter_context(observed())
        depths = stack.enter_context(recorded_depths())
        marks = stack.enter_context(collect_marks())
        for side, module in (("encoder", own.encoder), ("decoder", getattr(own, "decoder", None))):
            if module is None:
                continue
            feedforward = _FeedForwardHooks(side=side, requests=requests, calls=calls, marks=marks)
            feedforwards.append(feedforward)
            for layer in dict.fromkeys(module.sequence):  # layers of a group share one module
                stack.enter_context(hooked(layer.feedforward, feedforward.before, feedforward.after))
                kinds = {side: (layer.attention, module.mechanism)}
                if layer.cross_attention is not None:
                    kinds["encoder"] = (layer.cross_attention, layer.cross_attention.config.mechanism)
                for keys, (attention, config) in kinds.items():
                    hooks = _PolyformerHooks(
                        side=side, keys=keys, config=config, requests=requests, calls=calls, marks=marks
                    )
                    stack.enter_context(hooked(attention.mechanism, hooks.before, hooks.after))
                    stack.enter_context(hooked(attention, None, hooks.rest))
        model(**inputs)
    for call in calls:
        for hooks in feedforwards:
            if call.stack == call.keys == hooks.side:
                call.marks.extend(hooks.of_layers[call.layer] if call.layer < len(hooks.of_layers) else [])
        call.marks.extend(Mark("layers run", each[:, None].long(), "queries") for each in depths)
    return calls


@dataclasses.dataclass(eq=False, kw_only=True)
class _RecordingHooks:
    """Hooks around a module that add to `calls` its requests to `attend`, and the marks of its tokens."""

    requests: list[Request]
    calls: list[Call]
    marks: list[TokenRecord] = dataclasses.field(default_factory=list)
    first_request: int = 0
    first_mark: int = 0

    def before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Record where the module's own requests and marks begin."""
        self.first_request, self.first_mark = len(self.requests), len(self.marks)

    @property
    def own(self) -> list[Request]:
        """The requests since the module was called."""
        return self.requests[self.first_request :]

    def new_marks(self) -> list[TokenRecord]:
        """Return the marks since the module was called, or since the last call of this method."""
        new, self.first_mark = self.marks[self.first_mark :], len(self.marks)
        return new


@dataclasses.dataclass(eq=False, kw_only=True)
class _PolyformerHooks(_RecordingHooks):
    """Hooks that add every call of a mechanism of polyformer; its layer is the number of earlier calls."""

    side: str
    keys: str
    config: MechanismConfig

    def after(self, mechanism: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Add the call."""
        q, k, v, context, state, position = arguments
        layer = sum((call.stack, call.keys) == (self.side, self.keys) for call in self.calls)
        config = self.config.for_layer(layer)
        pattern = config.pattern if isinstance(config, SoftmaxConfig) else None
        text, marks = None if pattern is None else pattern.to_text(), self.new_marks()
        slots = next((record.tokens[0] for record in marks if isinstance(record, SlotKeys)), None)
        call = Call(self.side, self.keys, layer, config.kind, text, marks=marks, slots=slots)
        # If the only request has the call's own context, the mechanism is softmax attention to its tokens.
        softmax = isinstance(mechanism, SoftmaxAttention) or slots is not None
        if len(self.own) == 1 and (softmax or self.own[0].context is context):
            self.calls.append(dataclasses.replace(call, request=self.own[0]))
            return

        def mix(values: Tensor) -> Tensor:
            return mechanism.forward(q, k, values, context, state, position)[0]

        def weights() -> Tensor:
            with recorded() as records:
                mechanism.forward(q, k, v, context, state, position)
            return records[-1][0]

        if slots is not None:
            self.calls.append(dataclasses.replace(call, weights=weights, values=v))
        else:
            self.calls.append(dataclasses.replace(call, mix=mix, values=v))

    def rest(self, attention: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Add to the call the computations of its heads outside the mechanism."""
        call = self.calls[-1]
        call.marks.extend(self.new_marks())
        marks = [record for record in call.marks if isinstance(record, Mark)]
        flags = next((mark.values for mark in marks if mark.name == GLOBAL), None)
        if flags is not None and call.request is not None and len(self.own) == 2:
            rows = (flags[0, 0] >= 0).nonzero().flatten()
            self.calls[-1] = dataclasses.replace(call, projected=(rows, self.own[1]))


@dataclasses.dataclass(eq=False, kw_only=True)
class _FeedForwardHooks(_RecordingHooks):
    """Hooks that collect the marks of a stack's feed-forward layers, by layer."""

    side: str
    of_layers: list[list[TokenRecord]] = dataclasses.field(default_factory=list)

    def after(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Add the marks of the next layer."""
        self.of_layers.append(self.new_marks())


@contextlib.contextmanager
def hooked(module: nn.Module, before: Any, after: Any) -> Iterator[None]:
    """Call both hooks around every call of `module` within the context; `before` may be None."""
    handles = [module.register_forward_hook(after)]
    if before is not None:
        handles.append(module.register_forward_pre_hook(before))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _transformers_calls(model: Any, inputs: Mapping[str, Tensor]) -> list[Call]:
    layers = attention_layers(model)
    if not layers:
        raise InputError(
            f"model: no layer of {type(model).__name__} dispatches through transformers' AttentionInterface; "
            "convert the model with 'polyformer convert', or use another model"
        )
    import polyformer.models.transformers_attention  # noqa: F401  registers the implementation

    implementation = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    calls: list[Call] = []
    try:
        with contextlib.ExitStack() as stack, observed() as requests, collect_marks() as marks:
            windows = Windows(model)
            stack.enter_context(windows.watched())
            for layer in layers:
                hooks = _TransformersHooks(
                    layer=layer, requests=requests, calls=calls, marks=marks, windows=windows
                )
                stack.enter_context(hooked(layer.module, hooks.before, hooks.after))
            run_alone(model, inputs)
    finally:
        model.set_attn_implementation(implementation)
    return calls


@dataclasses.dataclass(eq=False, kw_only=True)
class _TransformersHooks(_RecordingHooks):
    """Hooks that add the call of `attend` by a layer of transformers."""

    layer: Layer
    windows: Windows

    def after(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Add the call; a layer belongs to a decoder if its attention is causal or to another sequence."""
        marks = self.new_marks()
        for request in self.own:
            if self.layer.module in self.windows.layers:
                self.calls.append(self.windows.call(self.layer, request))
                continue
            own = "decoder" if request.context.causal or self.layer.cross else "encoder"
            keys = "encoder" if self.layer.cross else own
            self.calls.append(Call(own, keys, self.layer.index, "softmax", request=request, marks=marks))
