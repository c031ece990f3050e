"""Attention within windows of an image (Swin): the rows of a layer's batch, combined into one call.

A layer of Swin may shift its grid of patches by half a window, cuts it into windows of w x w patches and
attends within each, with a window per row of its batch. Here the patches are in raster order, and a query
sees the keys of its window. Each stage has a separate grid with patches that are twice as large.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.composition import as_pattern
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import chain_score_mods, step, steps_of
from polyformer.cli.plots.explorer.calls import Call
from polyformer.core.instrumentation import Mark
from polyformer.core.sequence.context import Context
from polyformer.models.attached.attention_layers import Layer, uses_attention_interface

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
