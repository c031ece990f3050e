"""A model in numbers: its cost at each length, its parts, and a number or a curve for every layer and head.

The cost is measured on the meta device, without computing any numbers. If the cost of a part depends on
numbers, the part states its assumptions for the meta device: clusters and experts of equal size, the spans of
a new model, tokens that pass all layers. A part of somebody else that reads numbers instead is measured in a
real pass.

`draw_head_map` is a heat map of any number. `draw_fit` shows a fitted pattern: what every head got, and the
quality at each budget. `draw_spectra` shows the singular values of attention: the share of each matrix in its
greatest singular values.

    P = U S W^T,  s_1 >= s_2 >= ... >= s_n        share(i) = (s_1 + ... + s_i) / (s_1 + ... + s_n)

for the attention matrix P [n, n] of every layer and head, the mean over texts, in float64. A curve that rises
early means that a matrix of low rank is a good approximation; a straight line, that all ranks count the same.
Wang et al. 2020 (Linformer), section 3 and figure 1, which reads it at n / 4. Cost: n^3 per matrix.

A causal matrix is triangular, and its diagonal has each token's weight on its own value, so its rank is n
wherever all of these are above zero: compare decoders with decoders.
"""

import csv
import dataclasses
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyformer.applications.pattern_fitting import FittedPattern
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Pattern
from polyformer.core.errors import InputError, quote
from polyformer.core.files import Write, write_output
from polyformer.core.measuring import new_figure, save_figure
from polyformer.core.ops.product_kernels import counted_flops
from polyformer.core.ops.quantized import QuantizedWeight
from polyformer.models.architectures import Transformer, VisionTransformer

if TYPE_CHECKING:
    from polyformer.cli.commands.before_after import Comparison


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one text, or image, of `length` tokens (for an encoder-decoder: a source and a target of
    that length).

    flops: floating-point operations of one forward pass with the logits of all tokens; a product and its sum
    are two, and masked pairs count if they are computed. activations: bytes in float32 saved for the backward
    pass, without attention weights (fused kernels save none) and logits. cache: bytes in float32 of keys and
    values saved in generation, None for an encoder and for a mechanism without a cache.
    """

    length: int
    flops: int
    activations: int
    cache: int | None


def cost(model: Transformer, length: int) -> Cost:
    """Return the cost of a `model`, on the meta device or, for parts that read numbers, on another."""
    device = next(model.parameters()).device
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, length, dtype=torch.long, device=device)}
    if model.encoder is not None and model.decoder is not None:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return _cost(model, inputs, length, _cache(model, inputs, length))


def image_cost(model: VisionTransformer) -> Cost:
    """Return the cost of an image for a `model` on the meta device; `length` counts its tokens."""
    config = model.config
    pixels = torch.zeros(1, config.num_channels, *config.image_size, device="meta")
    return _cost(model, {"pixel_values": pixels}, config.image(*config.image_size).length, None)


def _cost(model: Any, inputs: dict[str, Any], length: int, cache: int | None) -> Cost:
    with torch.no_grad(), counted_flops() as counter:
        # Not model(...): the counter's hooks would unpack the output, and compute the logits twice.
        _ = model.eval().forward(**inputs).logits
    return Cost(length, counter.get_total_flops(), _kept(model, inputs, length), cache)


def _kept(model: Any, inputs: dict[str, Tensor], length: int) -> int:
    """Return the bytes that autograd saves, each memory once, without parameters and attention weights."""
    kept: dict[int, Tensor] = {}
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        # Weights are [H, length, length]; hidden states of a model as wide are [1, length, length].
        weights = tensor.shape[-2:] == (length, length) and tensor.numel() > length**2
        if not weights and tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model.train()(**inputs)
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _cache(model: Transformer, inputs: dict[str, Tensor], length: int) -> int | None:
    """Return the bytes of the layers' states after `length` tokens, without spare capacity."""
    if model.decoder is None or not model.decoder.mechanism.supports_kv_cache:
        return None
    ids = inputs["input_ids"]
    with torch.no_grad():
        if model.encoder is None:
            state = model.eval()(ids, state=model.new_state(length)).state
        else:
            state = model.eval()(decoder_input_ids=ids, state=model.encode(ids, reserve=length)).state
    assert state is not None
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    for layer in state.layers:
        layer.map(note)
    return sum(sizes)


LEFT_OUT = (nn.Dropout, nn.Identity)


def tree(model: nn.Module) -> str:
    """Return a line per part: its place, class and parameters (tied parameters at their owner)."""
    lines = list(_lines("", model, 0))
    width = max(len(text) for text, _ in lines)
    return "\n".join(f"{text:<{width}}  {number:>14,}" if number else text for text, number in lines)


def parameters(module: nn.Module) -> int:
    """Return the number of entries in parameters and quantized weights, tied ones once."""
    rounded = sum(
        part.outputs * part.inputs for part in module.modules() if isinstance(part, QuantizedWeight)
    )
    return rounded + sum(parameter.numel() for parameter in module.parameters())


def _lines(name: str, module: nn.Module, depth: int, times: int = 1) -> Iterator[tuple[str, int]]:
    many = f"{times} x " if times > 1 else ""
    yield (
        f"{'  ' * depth}{name + ' ' if name else ''}{many}{type(module).__name__}",
        parameters(module) * times,
    )
    for child, part, count in _children(module):
        yield from _lines(child, part, depth + 1, count)


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the children to show; a run of equal members of a list is a single child."""
    for name, child in module.named_children():
        if not isinstance(child, nn.ModuleList):
            if not isinstance(child, LEFT_OUT):
                yield name, child, 1
            continue
        members = list(child)
        start = 0
        for stop in range(1, len(members) + 1):
            if stop == len(members) or repr(members[stop]) != repr(members[start]):
                yield name, members[start], stop - start
                start = stop


def draw_head_map(values: Tensor, title: str, label: str, path: Path) -> None:
    """Draw values [layers, H], white for 0; the suffix of `path` determines the format.

    Raises `InputError` without matplotlib.
    """
    layers, heads = values.shape
    figure = new_figure(0.4 * heads + 2.5, 0.25 * layers + 1.5)
    axes = figure.subplots()
    most = values.abs().max().item() or 1.0
    shown = axes.imshow(values.numpy(), aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most)
    figure.colorbar(shown, ax=axes, label=label)
    axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(0, layers, 1 + layers // 20))
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path, write_output)


LEAST = 4
"""The number of tokens of the shortest text: a quarter of it is one singular value."""


@dataclasses.dataclass(frozen=True, eq=False)
class Spectrum:
    """The spectrum: `curves` [layers, H, n], float64: share(1), ..., share(n), means over `texts` texts."""

    curves: Tensor
    texts: int

    @property
    def length(self) -> int:
        """The number of tokens n of each text."""
        return self.curves.shape[-1]

    @property
    def quarter(self) -> int:
        """The number of singular values n / 4, rounded down."""
        return self.length // 4

    @property
    def at_quarter(self) -> Tensor:
        """The share at n / 4, [layers, H]."""
        return self.curves[..., self.quarter - 1]


def shares(matrices: Tensor) -> Tensor:
    """Return share(1), ..., share(n) [..., n] of matrices [..., n, n]; all 1 for a matrix of zeros."""
    sums = torch.linalg.svdvals(matrices.double()).cumsum(-1)
    total = sums[..., -1:]
    return torch.where(total > 0, sums / total, 1.0)


def spectra(model: Transformer, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Spectrum]:
    """Return the spectrum of self-attention in each stack of `model`: "encoder", "decoder".

    rows: for each text the input of `model`, ids [1, n] without padding, of one length. Dropout is off.
    Raises `InputError` for fewer than 4 tokens, and for mechanisms without a matrix of tokens by tokens.
    """
    check(model)
    for ids in (ids for row in rows for ids in row.values()):
        if ids.shape[-1] < LEAST:
            raise InputError(f"length: expected {LEAST} tokens or more, got {ids.shape[-1]}")
    training = model.training
    model.eval()
    try:
        by_text = [
            {side: shares(torch.stack(layers)).cpu() for side, layers in matrices(model, row).items()}
            for row in rows
        ]
    finally:
        model.train(training)
    sides = by_text[0] if by_text else {}
    curves = {side: torch.stack([each[side] for each in by_text]) for side in sides}
    return {side: Spectrum(each.mean(0), len(rows)) for side, each in curves.items()}


def check(model: Transformer) -> None:
    """Raise `InputError` for a layer without an attention matrix of tokens by tokens."""
    for stack in (model.encoder, model.decoder):
        for layer in range(0 if stack is None else len(stack.groups)):
            assert stack is not None
            mechanism = stack.mechanism.for_layer(layer)
            if not mechanism.pairs:
                members = [
                    kind for kind in MechanismConfig.kinds.values() if issubclass(kind, MechanismConfig)
                ]
                able = sorted(quote(member.kind) for member in members if member.pairs)
                raise InputError(
                    f"mechanism {quote(mechanism.kind)} has no attention matrix of tokens by tokens; "
                    f"these have one: {', '.join(able)}"
                )


@torch.no_grad()
def matrices(model: Transformer, row: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the self-attention [H, n, n] of every layer on one text, by stack."""
    output = model(**row, output_attentions=True)
    own = "encoder" if model.decoder is None else "decoder"
    attentions = {"encoder": output.encoder_attentions, own: output.attentions}
    return {side: [layer[0] for layer in layers] for side, layers in attentions.items() if layers is not None}


def spectrum_table(spectrum: Spectrum) -> str:
    """Return a row for each layer: share(n / 4) of every head, and their mean."""
    heads = range(spectrum.at_quarter.shape[1])
    lines = [f"{'layer':>5}" + "".join(f"{f'head {head}':>9}" for head in heads) + f"{'mean':>9}"]
    for layer, row in enumerate(spectrum.at_quarter):
        lines.append(
            f"{layer:>5}" + "".join(f"{share:>9.4f}" for share in [*row.tolist(), row.mean().item()])
        )
    return "\n".join(lines)


def spectrum_csv(spectra: Mapping[str, Spectrum]) -> str:
    """Return the columns stack, layer, head, index i, share(i): a row for each singular value."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["stack", "layer", "head", "index", "share"])
    for side, spectrum in spectra.items():
        for layer, heads in enumerate(spectrum.curves.tolist()):
            for head, curve in enumerate(heads):
                rows.writerows([side, layer, head, i, f"{share:.6g}"] for i, share in enumerate(curve, 1))
    return text.getvalue()


def draw_spectra(spectra: Mapping[str, Spectrum], title: str, path: Path, write: Write) -> None:
    """Draw a row for each stack: the curves of its layers (means over heads), and share(n / 4) of all heads.

    `write` saves the figure; the suffix of `path` determines the format. Raises `InputError` without
    matplotlib.
    """
    figure = new_figure(9.5, 3.6 * len(spectra) + 0.4)
    rows = figure.subplots(len(spectra), 2, squeeze=False)
    for (curves, heat), (side, spectrum) in zip(rows, spectra.items()):
        layers, heads = spectrum.at_quarter.shape
        colours = figure_colours(layers)
        index = range(1, spectrum.length + 1)
        for layer, curve in enumerate(spectrum.curves.mean(1).tolist()):
            curves.plot(index, curve, color=colours[layer], label=f"layer {layer}")
        curves.axvline(spectrum.quarter, color="0.7", linewidth=1, linestyle=":")
        curves.set(
            title=f"{side}: means over heads",
            xlabel="singular values",
            ylabel="share of their sum",
            xlim=(0, spectrum.length),
            ylim=(0, 1.02),
        )
        curves.legend(fontsize=7, frameon=False, loc="lower right", ncol=1 + (layers - 1) // 8)
        least = math.floor(20 * spectrum.at_quarter.min().item()) / 20  # colours from a round number up to 1
        shown = heat.imshow(spectrum.at_quarter.numpy(), aspect="auto", vmin=least, vmax=1)
        figure.colorbar(shown, ax=heat)
        heat.set(
            title=f"{side}: share of the greatest {spectrum.quarter}",
            xlabel="head",
            ylabel="layer",
            xticks=range(heads),
            yticks=range(layers),
        )
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path, write)


def figure_colours(number: int) -> list[tuple[float, float, float]]:
    """Return shades from light (the first layer) to dark."""
    steps = [layer / max(number - 1, 1) for layer in range(number)]
    return [(0.75 - 0.7 * step, 0.8 - 0.6 * step, 0.9 - 0.45 * step) for step in steps]


@dataclasses.dataclass(frozen=True, eq=False)
class FitQuality:
    """Dense and sparse attention compared on a text. before, after: the scores of tasks, from 0 to 1."""

    row: "Comparison"
    before: Mapping[str, float]
    after: Mapping[str, float]


def short_text(pattern: Pattern) -> str:
    """Return the expression of a pattern without the names of options."""
    return re.sub(r"\w+=", "", pattern.to_text())


def draw_fit(
    fits: Sequence[FittedPattern],
    results: Sequence[FitQuality],
    title: str,
    path: Path,
    write: Write,
) -> None:
    """Draw the share of the pairs of each head of the last fit, and the quality by budget if it is measured.

    `write` saves the figure; the suffix of `path` determines the format. Raises `InputError` without
    matplotlib.
    """
    shares = fits[-1].shares
    layers, heads = shares.shape
    figure = new_figure(4.5 + 4 * bool(results), 1.5 + 0.2 * layers)
    heat, *others = figure.subplots(1, 1 + bool(results), squeeze=False)[0]
    # A logarithm shows windows of all sizes.
    visible = shares.clamp_min(1e-3).numpy()
    shown = heat.imshow(visible, aspect="auto", norm="log", vmin=1e-3, vmax=1, cmap="Blues")
    bar = figure.colorbar(shown, ax=heat, label="pairs of a head", ticks=[1e-3, 1e-2, 1e-1, 1])
    bar.set_ticklabels(["0.1 %", "1 %", "10 %", "100 %"])
    heat.set(title=f"{fits[-1].share:.1%} of all pairs", xlabel="head", ylabel="layer", xticks=range(heads))
    for axes in others:
        _draw_quality(axes, fits, results)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path, write)


def _draw_quality(axes: Any, fits: Sequence[FittedPattern], results: Sequence[FitQuality]) -> None:
    """Draw perplexity, or the similarity of vectors, and the scores of tasks, by the share of the pairs."""
    shares = [fit.share for fit in fits]
    name = "similarity" if results[0].row.embeds else "perplexity / dense"
    axes.plot(shares, [result.row.quality for result in results], marker="o", label=name)
    for task in results[0].after:
        axes.plot(shares, [result.after[task] for result in results], marker="s", label=task)
    axes.set(xlabel="share of all pairs", xscale="log")
    axes.set_xticks(shares, [f"{share:.0%}" for share in shares])
    axes.minorticks_off()
    axes.legend(frameon=False)
