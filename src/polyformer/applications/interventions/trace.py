"""`trace`: read and replace heads, weights, patterns and the residual stream during calls of a model."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from polyformer.applications.interventions.sites import AttentionSite, hooked_sites
from polyformer.attention.patterns import Full, PerHead
from polyformer.attention.patterns.base import MaskMod, Pattern
from polyformer.attention.patterns.composition import as_pattern
from polyformer.core.argument_types import names_wrong_types
from polyformer.core.errors import InputError, quote


@dataclasses.dataclass(frozen=True, eq=False)
class TracedValue:
    """A tensor of every call: of all heads of a layer, of some heads, or of a residual stream.

    The methods add a reading or a change; these run in the order in which they were added.
    """

    site: AttentionSite
    kind: str
    heads: tuple[int, ...] | None = None  # None for the whole tensor

    def keep(self) -> list[Tensor]:
        """Return a list that receives the tensor of every call, with its graph, after earlier changes."""
        values: list[Tensor] = []

        def read(tensor: Tensor) -> Tensor:
            values.append(self._selected(tensor))
            return tensor

        self.site.changes[self.kind].append(read)
        return values

    def edit(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor by `change(tensor)`, which broadcasts to its shape."""

        def replaced(tensor: Tensor) -> Tensor:
            old = self._selected(tensor)
            new = torch.as_tensor(change(old), dtype=old.dtype, device=old.device)
            try:
                new = new.expand_as(old)
            except RuntimeError as error:
                raise InputError(
                    f"{self.kind} of {self.site.name}: expected a tensor that broadcasts to "
                    f"{tuple(old.shape)}, got {tuple(new.shape)}"
                ) from error
            if self.heads is None:
                return new
            return tensor.index_copy(1, torch.tensor(self.heads, device=tensor.device), new)

        self.site.changes[self.kind].append(replaced)

    def set(self, value: Tensor | float) -> None:
        """Replace the tensor by a number, or by a tensor that broadcasts to its shape."""
        self.edit(lambda _: torch.as_tensor(value))

    def _selected(self, tensor: Tensor) -> Tensor:
        return tensor if self.heads is None else tensor[:, self.heads]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedHeads:
    """Heads of an attention. With a KV cache Tq counts the tokens of each step, and Tk all tokens so far."""

    site: AttentionSite
    heads: tuple[int, ...] | None = None  # None for all

    @property
    def output(self) -> TracedValue:
        """The outputs [B, H, Tq, D], before the output projection."""
        return TracedValue(self.site, "output", self.heads)

    @property
    def weights(self) -> TracedValue:
        """The attention weights [B, H, Tq, Tk]; reading or changing them makes this layer compute all pairs.

        With a sink the weights are of the keys only: the sink's share is taken afterwards.
        """
        return TracedValue(self.site, "weights", self.heads)

    def limit(self, pattern: Pattern | MaskMod | str) -> None:
        """Remove the keys that `pattern` does not allow; the weights of the other keys sum to 1 again."""
        allowed = as_pattern(pattern)
        if self.heads is not None:
            heads = range(self.site.num_heads)
            allowed = PerHead(tuple(allowed if head in self.heads else Full() for head in heads))
        limited = lambda old: allowed if old is None else as_pattern(old) & allowed  # noqa: E731
        self.site.changes["pattern"].append(limited)

    @names_wrong_types
    def head(self, *numbers: int) -> "TracedHeads":
        """Return some of the heads; raises `InputError` for an unknown number."""
        for number in numbers:
            if not 0 <= number < self.site.num_heads:
                most = self.site.num_heads - 1
                raise InputError(f"head: expected 0 to {most} in {self.site.name}, got {number}")
        return TracedHeads(self.site, numbers)


class TracedLayer(TracedHeads):
    """The self-attention of a layer, and the residual stream around the layer."""

    @property
    def input(self) -> TracedValue:
        """The residual stream [B, T, E] before the layer."""
        return self._stream("input")

    @property
    def residual(self) -> TracedValue:
        """The residual stream [B, T, E] after the layer; with a post-norm block its norm is included."""
        return self._stream("residual")

    def _stream(self, kind: str) -> TracedValue:
        if not self.site.has_stream:
            raise InputError(f"{kind}: {self.site.name} has no single residual stream; change its output")
        return TracedValue(self.site, kind)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCalls:
    """The attention layers of a model while it is traced."""

    sites: list[AttentionSite]

    @functools.cached_property
    def layers(self) -> list[TracedLayer]:
        """All layers with self-attention, in the model's order."""
        return [TracedLayer(site) for site in self.sites if not site.cross]

    @names_wrong_types
    def layer(self, number: int, stack: str = "") -> TracedLayer:
        """Return a layer by its number in its stack.

        stack: "encoder" or "decoder", if the model has both; for a model of transformers any part of the
        layer's name. Raises `InputError` for no such layer or several.
        """
        return TracedLayer(self._site(number, stack, cross=False))

    @names_wrong_types
    def cross(self, number: int, stack: str = "") -> TracedHeads:
        """Return the cross-attention of a layer; see `layer`."""
        return TracedHeads(self._site(number, stack, cross=True))

    def _site(self, number: int, stack: str, cross: bool) -> AttentionSite:
        all_sites = [site for site in self.sites if site.cross == cross]
        sites = [site for site in all_sites if site.number == number and stack in site.name]
        if len(sites) == 1:
            return sites[0]
        names = [site.name for site in sites or all_sites]
        listed = ", ".join(names if len(names) < 5 else [*names[:2], "...", names[-1]]) or "none"
        of_stack = f" with {quote(stack)} in its name" if stack else ""
        raise InputError(
            f"layer: expected a single layer {number}{of_stack}, got {len(sites)}; there are {listed}"
        )


@contextlib.contextmanager
def trace(model: nn.Module) -> Iterator[TracedCalls]:
    """Read and replace values inside a model during its calls within the context.

        with polyformer.trace(model) as calls:
            calls.layer(3).head(5).output.set(0)          # ablate a head
            calls.layer(2).head(1).limit("Window(64)")    # cut attention edges
            calls.layer(2).weights.edit(change)           # weights [B, H, Tq, Tk] -> new weights
            stream = calls.layer(4).residual.keep()       # a list with a tensor per call
            model(ids)

    Gradients pass through every reading and change. Each step of `generate` is a call. The model is restored
    on exit. A model of transformers runs `attend` within the context, with the attachments of
    `polyformer.attach`, if any.

    Raises:
        InputError: a compiled model, or a model of transformers that does not dispatch. During a call:
            changed weights of a mechanism without a softmax over its keys, and a stack that computes its
            layers again in the backward pass.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a model of polyformer or of transformers, got {quote(model)}")
    with hooked_sites(model) as sites:
        yield TracedCalls(sites)
