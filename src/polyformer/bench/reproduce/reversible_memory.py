"""The claim "reversible layers need the activation memory of one" (Gomez et al. 2017, section 3).

Equal decoders but for their depth and their wiring take one training step. Two numbers for each: MiB that the
forward pass keeps for the backward pass, counted tensor by tensor, and MiB at the peak of both passes, of a
process of its own, less the gradients of the parameters. The claim holds where both numbers of the deepest
reversible stack are within 1.3 of the shallowest one's, while pre-norm's rise with depth.
"""

import dataclasses
import functools
import os
import unittest.mock
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from polyformer.bench.claims import write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.memory import MIB, peak_mib
from polyformer.bench.plot import line_plot
from polyformer.block import BlockConfig
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.feedforward import DenseConfig
from polyformer.sequence.context import Context
from polyformer.stack import AttentionConfig, Stack, StackConfig
from polyformer.training.config import at_least

BLOCKS = "pre", "reversible"
FLAT = 1.3
"""Memory of the deepest over that of the shallowest stack, at most."""

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Has the C library of Linux give freed memory back at once: otherwise it keeps holes, more a layer."""

Found = Mapping[tuple[str, int], tuple[float, float]]
"""MiB kept and MiB at the peak, by wiring and layers."""


EXPERIMENT = Experiment(
    quick={"layers": (1, 2), "width": 8, "heads": 2, "length": 16},
    claims=(
        Claim(
            name="reversible-memory",
            says="reversible layers need the activation memory of one",
            paper="Gomez et al. 2017 (RevNet); Kitaev et al. 2020 (Reformer)",
            section="section 3; section 3",
            published="activation memory independent of depth",
            measured="MiB kept for the backward pass, and at the peak of both passes, by depth",
            scale="decoders of 4 to 24 layers of 64, 2,048 tokens",
            rule="both numbers of the deepest stack within 1.3 of the shallowest's, while pre-norm's "
            "rise by more",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReversibleMemoryClaim(Config):
    """Sizes of the stacks."""

    layers: tuple[int, ...] = (4, 8, 16, 24)
    width: int = 64
    heads: int = 4
    length: int = 2048
    dropout: float = 0.1
    device: str = "cpu"
    out: str = "runs/reversible_memory"

    def __post_init__(self) -> None:
        at_least(1, width=self.width, heads=self.heads, length=self.length)
        if len(self.layers) < 2 or min(self.layers) < 1:
            raise InputError(f"layers: expected two depths or more, each 1 or more, got {list(self.layers)}")


@dataclasses.dataclass(frozen=True)
class Size:
    """One training step of one stack."""

    claim: ReversibleMemoryClaim
    block: str
    layers: int


def run(config: ReversibleMemoryClaim) -> Found:
    """Measure every stack; write OUT/reversible_memory.csv and .png, print a table and the verdict."""
    results: dict[tuple[str, int], tuple[float, float]] = {}
    for block in BLOCKS:
        for layers in config.layers:
            size = Size(config, block, layers)
            results[block, layers] = kept_mib(size), _peak(size)
            kept, peak = results[block, layers]
            print(f"{block}, {layers} layers: {kept:.1f} MiB kept, {peak:.1f} MiB at the peak", flush=True)
    folder = Path(config.out)
    rows = ((*key, *values) for key, values in results.items())
    write_csv(folder / "reversible_memory.csv", ("block", "layers", "kept_mib", "peak_mib"), rows)
    lines = {
        f"{block}, {what}": [(n, results[block, n][index]) for n in config.layers]
        for block in BLOCKS
        for index, what in enumerate(("kept", "peak"))
    }
    line_plot(folder / "reversible_memory.png", lines, "layers", "MiB")
    print(f"curves: {folder / 'reversible_memory.png'}")
    conclude(EXPERIMENT, config, [verdict(results)])
    return results


def verdict(results: Found) -> Verdict:
    """What the memory of the shallowest and the deepest stacks says of the claim."""
    depths = sorted({layers for _, layers in results})
    least, most = depths[0], depths[-1]
    ratios = {block: [results[block, most][i] / results[block, least][i] for i in (0, 1)] for block in BLOCKS}
    holds = max(ratios["reversible"]) <= FLAT < min(ratios["pre"])
    figures = "; ".join(f"{name} {kept:.2f} kept, {peak:.2f} peak" for name, (kept, peak) in ratios.items())
    return verdict_of(
        holds,
        f"reversible memory is flat in depth: {'reproduced' if holds else 'not reproduced'} "
        f"({most} layers over {least}: {figures})",
    )


def built(size: Size) -> tuple[Stack, Callable[[], Tensor]]:
    """A stack in training and its forward pass, whose output is one number."""
    claim = size.claim
    torch.manual_seed(0)
    config = StackConfig(
        num_hidden_layers=size.layers,
        attention=AttentionConfig(num_attention_heads=claim.heads),
        feedforward=DenseConfig(intermediate_size=4 * claim.width),
        block=BlockConfig.from_dict(size.block),
        dropout=claim.dropout,
    )
    stack = Stack(config, claim.width, claim.length, cross=False).to(claim.device).train()
    x = torch.randn(1, claim.length, claim.width, device=claim.device, requires_grad=True)
    pos = torch.arange(claim.length, device=claim.device)
    context = Context(claim.length, claim.length, causal=True)
    return stack, lambda: stack(x, pos, context)[0].square().mean()


def kept_mib(size: Size) -> float:
    """MiB of the tensors, parameters aside, that the forward pass keeps."""
    stack, forward = built(size)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in stack.parameters()}
    held: weakref.WeakSet[Saved] = weakref.WeakSet()  # a graph that is dropped drops what it saved

    def keep(tensor: Tensor) -> Saved:
        saved = Saved(tensor.detach())  # with its graph it would hold what holds it
        held.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved.tensor):
        value = forward()
    stores = (saved.tensor.untyped_storage() for saved in held)
    sizes = {store.data_ptr(): store.nbytes() for store in stores if store.data_ptr() not in parameters}
    del value  # alive until here, and its graph with it
    return sum(sizes.values()) / MIB


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """What autograd holds in place of a tensor."""

    tensor: Tensor


def _peak(size: Size) -> float:
    small = dataclasses.replace(size, claim=dataclasses.replace(size.claim, length=16))
    gradients = sum(parameter.nbytes for parameter in built(small)[0].parameters()) / MIB
    with unittest.mock.patch.dict(os.environ, RETURNED):
        return peak_mib(_step, size, small, size.claim.device) - gradients


def _step(size: Size) -> Callable[[], object]:
    stack, forward = built(size)
    return functools.partial(_train, stack, forward)


def _train(stack: Stack, forward: Callable[[], Tensor]) -> None:
    stack.zero_grad(set_to_none=True)
    forward().backward()
