"""Heads, feed-forwards and vocabulary divided over processes that read the same batches: tensor parallelism.

    attention       W_q, W_k, W_v by rows of [out, in], whole heads each; W_o by columns
    feed-forward    W_up (and W_gate) by rows, W_down by columns
    experts         so in each of them; what they make of a token is added up first, and then summed
    vocabulary      the token table and the output matrix by rows (`polyformer.parallel.vocabulary`)

A process computes some heads and some of the inner layer for all tokens. Between its two products nothing is
exchanged; after the second the outputs are summed over processes, and in the backward pass the gradients of
the input. Norms and positions stay whole in every process, and see the same numbers there. Plans of torch's
`parallelize_module`; Shoeybi et al. 2019 (Megatron-LM), section 3.

Every process has a part of every expert, not some experts whole, which would take as much memory: so all
work equally long wherever the router sends the tokens, and draw the same random numbers.

Dropout inside heads and inner layers drops the same places of every process's share.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from polyformer.attention.softmax_attention import SoftmaxAttention
from polyformer.core.errors import InputError, quote
from polyformer.dot_product.relative import Relative
from polyformer.feedforward.chunked import Chunked
from polyformer.feedforward.dense import Dense
from polyformer.feedforward.experts import Experts
from polyformer.feedforward.gated import Gated
from polyformer.ops.linear import Linear, linear
from polyformer.parallel.parts import divided, part, shown, summed
from polyformer.parallel.shard import stacks
from polyformer.parallel.vocabulary import divide_vocabulary
from polyformer.patterns.base import Pattern
from polyformer.patterns.per_head import PerHead
from polyformer.patterns.user_defined import MaskModPattern
from polyformer.position import Position, changes_scores
from polyformer.position.alibi import Alibi
from polyformer.position.shaw import Shaw
from polyformer.position.t5 import T5Bias
from polyformer.stack import Layer, MultiHeadAttention, Stack

BY_DISTANCE = (Alibi, T5Bias, Shaw)
"""Schemes that change scores by tables made without the projections of heads."""

DIVIDED = (Dense, Gated, Experts, Chunked)
"""Feed-forwards of which each process has a part."""


def divide_heads(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Divide every stack of `model`, and its vocabulary, over `mesh`, [tensor]; `InputError`, before anything
    is changed, for a stack that cannot be. Returns notes of what stays whole in every process."""
    sides = check_divides(model, mesh.size())
    for stack in sides.values():
        stack.position.__dict__["relative"] = functools.partial(_own_terms, stack.position, mesh)
        for layer in stack.layers:
            assert isinstance(layer, Layer)
            parallelize_module(layer, mesh, _plan(layer))
            for attention in (layer.attention, layer.cross_attention):
                if attention is not None:
                    _keep_own_heads(attention, mesh)
    feedforwards = [layer.feedforward for stack in sides.values() for layer in stack.layers]
    whole = {type(module).__name__ for module in feedforwards if not isinstance(module, DIVIDED)}
    notes = [f"tensor: {quote(kind)} is whole in every process" for kind in sorted(whole)]
    return notes + divide_vocabulary(model, mesh)


def check_divides(model: nn.Module, count: int) -> dict[str, Stack]:
    """The stacks of `model`, by name; `InputError` for a part of one that `count` processes cannot share."""
    sides = stacks(model)
    if not sides:
        raise InputError("tensor: this model has no stack of layers to divide; use shard")
    for name, stack in sides.items():
        _check(name, stack, count)
    return sides


class Columns(Linear):
    """Some of the outputs of a linear layer: x [..., E], the same in all processes -> [..., O / n]."""

    mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:
        """Own rows of W, and of the bias, times x."""
        return self.product(shown(input, self.mesh))

    def product(self, x: Tensor) -> Tensor:
        """The same of an input that is `shown` already."""
        return linear(x, part(self.weight), None if self.bias is None else part(self.bias))

    @staticmethod
    def together(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor] | None:
        """What several layers make of x, whose gradients are then exchanged once."""
        own = [layer for layer in layers if isinstance(layer, Columns)]
        if len(own) < len(layers):
            return None
        x = shown(x, own[0].mesh)
        return [layer.product(x) for layer in own]


class Rows(Linear):
    """A linear layer of which each process has some of the inputs: [..., I / n] -> [..., O], all of it."""

    mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:
        """sum over processes of own columns of W times x, plus b."""
        y = summed(linear(input, part(self.weight)), self.mesh)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class InnerColumns(Columns):
    """`Columns` inside an expert, whose input is `shown` before it is sent to experts."""

    def forward(self, input: Tensor) -> Tensor:
        """Own rows of W, and of the bias, times x."""
        return self.product(input)

    @staticmethod
    def together(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        """What several layers make of x."""
        return [layer(x) for layer in layers]


class InnerRows(Rows):
    """`Rows` inside an expert, whose outputs are summed over processes after they are put together."""

    def forward(self, input: Tensor) -> Tensor:
        """Own columns of W times x, plus one of n equal parts of b, whose gradient is that of all of b."""
        y = linear(input, part(self.weight))
        if self.bias is None:
            return y
        bias = self.bias + self.bias.detach() * (1 / self.mesh.size() - 1)
        return y + bias.to(y.dtype)


class PartOfExperts(Experts):
    """Experts of each of which this process has some of the inner layer: what they make of a token is summed
    over processes once, after the gates, however many experts read it."""

    mesh: DeviceMesh

    def _grouped(self, x: Tensor, chosen: Tensor, gates: Tensor, taken: Tensor) -> Tensor:
        return summed(
            super()._grouped(shown(x, self.mesh), chosen, shown(gates, self.mesh), taken), self.mesh
        )

    def _plainly(self, x: Tensor, chosen: Tensor, gates: Tensor, taken: Tensor) -> Tensor:
        return summed(
            super()._plainly(shown(x, self.mesh), chosen, shown(gates, self.mesh), taken), self.mesh
        )


class Style(ParallelStyle):
    """How one module of ours is divided: its class afterwards, and its tensors' placements."""

    def __init__(self, kind: type[nn.Module], **placements: Placement) -> None:
        super().__init__()
        self.kind, self.placements = kind, placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            whole = getattr(module, name)
            if whole is not None:
                module.register_parameter(name, divided(whole, device_mesh, placement))
        module.__class__ = self.kind
        module.__dict__["mesh"] = device_mesh
        return module


def _plan(layer: Layer) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    experts: tuple[str, ...] = ()
    for name, module in layer.named_modules():
        inside = name.startswith(experts)
        columns = Style(InnerColumns if inside else Columns, weight=Shard(0), bias=Shard(0))
        rows = Style(InnerRows if inside else Rows, weight=Shard(1))  # all have the whole bias
        if isinstance(module, MultiHeadAttention):
            plan |= {f"{name}.{projection}": columns for projection in ("query", "key", "value")}
            plan[f"{name}.output"] = rows
        elif isinstance(module, Dense | Gated):
            plan |= {f"{name}.up": columns, f"{name}.down": rows}
            if isinstance(module, Gated):
                plan[f"{name}.gate"] = columns
        elif isinstance(module, Experts) and all(map(_has_inner_layer, module.experts)):
            plan[name] = Style(PartOfExperts)
            experts += (f"{name}.",)
    return plan


def _has_inner_layer(expert: nn.Module) -> bool:
    """Whether an expert is divided; of others every process computes all that they put out."""
    while isinstance(expert, Chunked):
        expert = expert.inner
    return isinstance(expert, Dense | Gated)


def _keep_own_heads(attention: MultiHeadAttention, mesh: DeviceMesh) -> None:
    """Let the module count the heads of this process, and give these their own patterns."""
    config, count = attention.config, mesh.size()
    heads = config.num_attention_heads // count
    attention.config = dataclasses.replace(
        config,
        num_attention_heads=heads,
        num_key_value_heads=config.kv_heads // count,
        head_size=attention.head_size,
    )
    mechanism = attention.mechanism
    assert isinstance(mechanism, SoftmaxAttention)
    pattern = mechanism.config.pattern
    if pattern is not None:
        first = mesh.get_local_rank() * heads
        own = [pattern.head_pattern(head) for head in range(first, first + heads)]
        alike = all(other == own[0] for other in own)
        mechanism.config = dataclasses.replace(
            mechanism.config, pattern=own[0] if alike else PerHead(tuple(own))
        )


def _own_terms(position: Position, mesh: DeviceMesh, *arguments: Any) -> Relative | None:
    """What `position.relative` says of the heads of this process, with the gradients of all."""
    terms = type(position).relative(position, *arguments)
    if terms is None:
        return None
    heads = arguments[0].shape[1]
    first = mesh.get_local_rank() * heads

    def own(table: Tensor) -> Tensor:
        table = shown(table, mesh) if table.requires_grad else table
        return table if len(table) == 1 else table[first : first + heads]

    return dataclasses.replace(terms, **{name: own(table) for name, table in terms.tables.items()})


def _check(name: str, stack: Stack, count: int) -> None:
    def refuse(reason: str) -> InputError:
        return InputError(f"tensor: {name or 'the stack'}: {reason}; leave tensor at 1, and use shard")

    if changes_scores(stack.position) and not isinstance(stack.position, BY_DISTANCE):
        kind = type(stack.position).__name__
        raise refuse(f"positions of {quote(kind)} change the scores of whole groups of heads")
    if stack.memory is not None or stack.depth is not None or stack.reversible:
        part_of = "a memory" if stack.memory is not None else "an adaptive depth"
        raise refuse(f"{'a reversible block' if stack.reversible else part_of} is not divided by heads")
    for layer in stack.layers:
        for module in layer.modules():
            if isinstance(module, MultiHeadAttention):
                _check_attention(module, count, refuse)
            elif isinstance(module, Dense | Gated) and module.up.out_features % count:
                raise refuse(f"intermediate_size {module.up.out_features} does not divide by tensor {count}")


def _check_attention(attention: MultiHeadAttention, count: int, refuse: Callable[[str], InputError]) -> None:
    config = attention.config
    for option, heads in (
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", config.kv_heads),
    ):
        if heads % count:
            raise refuse(f"{option} {heads} does not divide by tensor {count}")
    if attention.global_attention is not None:
        raise refuse("global_projections are not divided by heads")
    if not isinstance(attention.mechanism, SoftmaxAttention):
        raise refuse(f"the mechanism {quote(config.mechanism.kind)} is not divided by heads; 'softmax' is")
    pattern = attention.mechanism.config.pattern
    if pattern is not None and _asks_heads(pattern):
        raise refuse("a mask_mod of one's own may ask for the number of a head")


def _asks_heads(pattern: Any) -> bool:
    if isinstance(pattern, MaskModPattern):
        return True
    if isinstance(pattern, list | tuple):
        return any(map(_asks_heads, pattern))
    if not isinstance(pattern, Pattern) or not dataclasses.is_dataclass(pattern):
        return False
    return any(_asks_heads(getattr(pattern, field.name)) for field in dataclasses.fields(pattern))
