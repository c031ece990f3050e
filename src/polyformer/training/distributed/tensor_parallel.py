"""Tensor parallelism: heads, feed-forwards and vocabulary divided over processes that read the same batches.

    attention       W_q, W_k, W_v by rows of [out, in], whole heads each; W_o by columns
    feed-forward    W_up (and W_gate) by rows, W_down by columns
    experts         the same in each expert; the outputs of a token are added locally, then all-reduced
    vocabulary      the token table and the output matrix by rows

A process computes some heads and some of the inner units for all tokens. There is no communication between
its two products; after the second an all-reduce sums the outputs, and in the backward pass the gradients of
the input. Norms and positions are replicated, with the same values in all processes. Uses plans of torch's
`parallelize_module`; Shoeybi et al. 2019 (Megatron-LM), section 3.

    embedding   x_t = sum over processes of W[t], which is 0 in processes that do not have the row
    loss        log sum_v exp l_v - l_label, where each process has only its own part of the logits l: they
                communicate the maximum, the sum of exponentials and the logit of the label, three per token
    logits      gathered only when they are read

Each process has ceil(V / n) rows, the last fewer where V does not divide, and the same part of the bias.
Therefore no process has logits, a gradient or optimizer state of more than its rows. The loss is computed in
chunks of tokens (`polyformer.core.ops.cross_entropy`).

Every process has a shard of every expert, instead of some whole experts, which would take the same memory.
Therefore all processes have the same work for any routing, and draw the same random numbers.

Dropout inside heads and inner layers drops the same positions of the shard of every process.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms.softmax_attention import SoftmaxAttention
from polyformer.attention.patterns.base import contains
from polyformer.attention.patterns.composition import MaskModPattern, PerHead
from polyformer.attention.positions import Position
from polyformer.attention.positions.by_distance import Alibi, Shaw, T5Bias
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.cross_entropy import linear_cross_entropy
from polyformer.core.ops.int8 import Int8Weight, as_matrix
from polyformer.core.ops.linear import Linear, linear
from polyformer.models.architectures.transformer import DraftingTransformer, Transformer
from polyformer.nn.feedforward.experts import Experts
from polyformer.nn.feedforward.feedforward import Chunked, Dense, Gated
from polyformer.nn.heads.vocabulary import VocabularyHead, VocabularyOutput
from polyformer.nn.stack import Layer, MultiHeadAttention, Stack
from polyformer.training.distributed.fully_sharded import (
    all_reduce,
    copy_to_group,
    local_shard,
    local_stacks,
    shard_parameter,
)


def apply_vocabulary_parallel(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Divide the token tables and output matrices in `model` over `mesh`, [tensor].

    Returns notes about tables that are replicated because a module reads all their rows.
    """
    transformers = [module for module in model.modules() if isinstance(module, Transformer)]
    whole: dict[int, str] = {}
    for transformer in transformers:  # several of them may share a table
        rows = VocabularyRows(mesh, transformer.config.vocab_size)
        for table in _token_tables(transformer):
            if (reason := _why_replicated(transformer, table, rows)) is not None:
                whole[id(table)] = reason
    own: dict[int, nn.Parameter] = {}
    for transformer in transformers:
        rows = VocabularyRows(mesh, transformer.config.vocab_size)
        for table in _token_tables(transformer):
            if id(table) not in whole:
                _shard_rows(table, "weight", mesh, own)
                table.__class__ = VocabularyParallelEmbedding
                table.__dict__["rows"] = rows
        tied = id(transformer._output_table()) not in whole
        for head in transformer.head.modules():
            if (
                isinstance(head, VocabularyHead)
                and head.supports_vocabulary_parallel
                and _has_rows(head, tied, rows)
            ):
                _shard_rows(head, "weight", mesh, own)
                _shard_rows(head, "bias", mesh, own)
                head.output = VocabularyParallelOutput(rows)
    reasons = dict.fromkeys(whole.values())
    return [f"tensor: a token table is whole in every process: {reason}" for reason in reasons]


class VocabularyRows:
    """The rows of a vocabulary in this process of `mesh`: at most `most`, starting at `first`."""

    def __init__(self, mesh: DeviceMesh, vocab: int) -> None:
        self.mesh, self.vocab = mesh, vocab
        self.most = -(-vocab // mesh.size())
        self.first = mesh.get_local_rank() * self.most
        self.every_rank_has_rows = (
            self.most * (mesh.size() - 1) < vocab
        )  # whether each process has at least one row

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local index of each of `ids`, 0 if the row is elsewhere, and whether it is local."""
        places = ids - self.first
        here = (places >= 0) & (places < self.most)
        return places.masked_fill(~here, 0), here

    def largest(self, x: Tensor) -> Tensor:
        """All-reduce x in place to the elementwise maximum over processes."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.mesh.get_group())
        return x

    def total(self, x: Tensor) -> Tensor:
        """All-reduce x in place to the sum over processes."""
        dist.all_reduce(x, group=self.mesh.get_group())
        return x


class VocabularyParallelEmbedding(nn.Embedding):
    """An embedding with some rows of a token table per process: ids [...] -> vectors [..., E]."""

    rows: VocabularyRows

    def forward(self, input: Tensor) -> Tensor:
        """Look up local rows, and all-reduce over processes."""
        places, here = self.rows.places(input)
        vectors = F.embedding(places, local_shard(self.weight))
        return all_reduce(vectors.masked_fill(~here.unsqueeze(-1), 0), self.rows.mesh)


class VocabularyParallelOutput(VocabularyOutput):
    """The loss and the logits for an output matrix and a bias divided over processes by `rows`."""

    def __init__(self, rows: VocabularyRows) -> None:
        self.rows = rows

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor | Int8Weight,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
    ) -> Tensor:
        """Return `linear_cross_entropy` of the local logits, reduced over processes."""
        own = local_shard(as_matrix(weight))
        return linear_cross_entropy(hidden, own, self._bias(bias, own), labels, smoothing, self.rows)

    def logits(self, hidden: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None) -> Tensor:
        """Return logits [..., V], gathered from all processes."""
        own, mesh = local_shard(as_matrix(weight)), self.rows.mesh
        logits = linear(copy_to_group(hidden, mesh), own, self._bias(bias, own))
        shape = (*logits.shape[:-1], self.rows.vocab)
        strides = torch.empty(shape, device="meta").stride()
        last = [Shard(logits.dim() - 1)]
        whole = DTensor.from_local(
            logits, mesh, last, run_check=False, shape=torch.Size(shape), stride=strides
        )
        return whole.redistribute(mesh, [Replicate()]).to_local()

    def _bias(self, bias: Tensor | None, own: Tensor) -> Tensor | None:
        """Return the local part of a bias; an untrained bias is not a parameter, and replicated."""
        if bias is None or isinstance(bias, DTensor):
            return None if bias is None else local_shard(bias)
        return bias[self.rows.first : self.rows.first + len(own)]


def _token_tables(transformer: Transformer) -> list[nn.Module]:
    return [table for table in (transformer.tokens, transformer.decoder_tokens) if table is not None]


def _why_replicated(transformer: Transformer, table: nn.Module, rows: VocabularyRows) -> str | None:
    """Return why each process needs all of a table; None if it can be divided."""
    if not isinstance(table, nn.Embedding):
        return "it is one of clusters (embedding.adaptive), or int8"
    if not rows.every_rank_has_rows:
        return f"its {rows.vocab} rows leave one of {rows.mesh.size()} processes none"
    if table is transformer._output_table() and not transformer.head.supports_vocabulary_parallel:
        return f"the head {quote(transformer.config.head.kind)} reads all of it"
    return None


def _has_rows(head: VocabularyHead, tied: bool, rows: VocabularyRows) -> bool:
    """Return whether the matrix of a head can be divided by rows; tied: whether the token table can."""
    return tied if head.weight is None else isinstance(head.weight, nn.Parameter) and rows.every_rank_has_rows


def _shard_rows(module: nn.Module, name: str, mesh: DeviceMesh, own: dict[int, nn.Parameter]) -> None:
    """Replace a parameter in `module` by its local rows; `own` contains the parameters already divided."""
    whole = module._parameters.get(name)
    if whole is not None and not isinstance(whole, DTensor):
        module.register_parameter(name, own.setdefault(id(whole), shard_parameter(whole, mesh, Shard(0))))


BY_DISTANCE = (Alibi, T5Bias, Shaw)
"""Position schemes that change scores by tables, independent of the projections of heads."""

PARALLEL_FEEDFORWARDS = (Dense, Gated, Experts, Chunked)
"""Feed-forwards that are divided over the processes."""


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Divide every stack of `model`, and its vocabulary, over `mesh`, [tensor].

    Raises `InputError`, before any change, for a stack that cannot be divided. Returns notes about modules
    that are replicated in every process.
    """
    sides = check_tensor_parallel(model, mesh.size())
    for stack in sides.values():
        stack.position.__dict__["relative"] = functools.partial(_local_relative_terms, stack.position, mesh)
        for layer in stack.layers:
            assert isinstance(layer, Layer)
            parallelize_module(layer, mesh, _parallelize_plan(layer))
            for attention in (layer.attention, layer.cross_attention):
                if attention is not None:
                    _keep_local_heads(attention, mesh)
    feedforwards = [layer.feedforward for stack in sides.values() for layer in stack.layers]
    whole = {
        type(module).__name__ for module in feedforwards if not isinstance(module, PARALLEL_FEEDFORWARDS)
    }
    notes = [f"tensor: {quote(kind)} is whole in every process" for kind in sorted(whole)]
    return notes + apply_vocabulary_parallel(model, mesh)


def check_tensor_parallel(model: nn.Module, count: int) -> dict[str, Stack]:
    """Return the stacks of `model`, by name; raise `InputError` if `count` processes cannot divide a part."""
    sides = local_stacks(model)
    if not sides:
        raise InputError("tensor: this model has no stack of layers to divide; use shard")
    if isinstance(model, DraftingTransformer):
        raise InputError("tensor: parts that draft are not divided; leave tensor at 1, and use shard")
    for name, stack in sides.items():
        _check(name, stack, count)
    return sides


class ColumnParallelLinear(Linear):
    """A column-parallel linear layer: x [..., E], the same in all processes -> [..., O / n]."""

    mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the local rows of W, plus the local bias."""
        return self.product(copy_to_group(input, self.mesh))

    def product(self, x: Tensor) -> Tensor:
        """Return the same for an input that already went through `copy_to_group`."""
        return linear(x, local_shard(self.weight), None if self.bias is None else local_shard(self.bias))

    @staticmethod
    def together(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor] | None:
        """Return the outputs of several layers for x, with a single all-reduce of the gradient of x."""
        own = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
        if len(own) < len(layers):
            return None
        x = copy_to_group(x, own[0].mesh)
        return [layer.product(x) for layer in own]


class RowParallelLinear(Linear):
    """A row-parallel linear layer: x [..., I / n], divided over processes -> [..., O], replicated."""

    mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum over processes of the local columns of W times x, plus b."""
        y = all_reduce(linear(input, local_shard(self.weight)), self.mesh)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ExpertColumnParallelLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` in an expert; `copy_to_group` runs once, before tokens go to experts."""

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input)

    @staticmethod
    def together(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        return [layer(x) for layer in layers]


class ExpertRowParallelLinear(RowParallelLinear):
    """A `RowParallelLinear` inside an expert; outputs are all-reduced once, after the gates combine them."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the local columns of W times x, plus b / n with the gradient of all of b."""
        y = linear(input, local_shard(self.weight))
        if self.bias is None:
            return y
        bias = self.bias + self.bias.detach() * (1 / self.mesh.size() - 1)
        return y + bias.to(y.dtype)


class ShardedExperts(Experts):
    """Experts with inner layers divided over processes.

    The outputs for a token are all-reduced once, after the gates, for any number of experts per token.
    """

    mesh: DeviceMesh

    def _mix_grouped(self, x: Tensor, chosen: Tensor, gates: Tensor, taken: Tensor) -> Tensor:
        return all_reduce(
            super()._mix_grouped(copy_to_group(x, self.mesh), chosen, copy_to_group(gates, self.mesh), taken),
            self.mesh,
        )

    def _mix_dense(self, x: Tensor, chosen: Tensor, gates: Tensor, taken: Tensor) -> Tensor:
        return all_reduce(
            super()._mix_dense(copy_to_group(x, self.mesh), chosen, copy_to_group(gates, self.mesh), taken),
            self.mesh,
        )


class ShardingStyle(ParallelStyle):
    """The parallel style of a module: the class that it gets, and the placements of its tensors."""

    def __init__(self, kind: type[nn.Module], **placements: Placement) -> None:
        super().__init__()
        self.kind, self.placements = kind, placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            whole = getattr(module, name)
            if whole is not None:
                module.register_parameter(name, shard_parameter(whole, device_mesh, placement))
        module.__class__ = self.kind
        module.__dict__["mesh"] = device_mesh
        return module


def _parallelize_plan(layer: Layer) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    experts: tuple[str, ...] = ()
    for name, module in layer.named_modules():
        inside = name.startswith(experts)
        columns = ShardingStyle(
            ExpertColumnParallelLinear if inside else ColumnParallelLinear, weight=Shard(0), bias=Shard(0)
        )
        rows = ShardingStyle(
            ExpertRowParallelLinear if inside else RowParallelLinear, weight=Shard(1)
        )  # the bias is replicated
        if isinstance(module, MultiHeadAttention):
            plan |= {f"{name}.{projection}": columns for projection in ("query", "key", "value")}
            plan[f"{name}.output"] = rows
        elif isinstance(module, Dense | Gated):
            plan |= {f"{name}.up": columns, f"{name}.down": rows}
            if isinstance(module, Gated):
                plan[f"{name}.gate"] = columns
        elif isinstance(module, Experts) and all(map(_has_inner_layer, module.experts)):
            plan[name] = ShardingStyle(ShardedExperts)
            experts += (f"{name}.experts.",)  # a shared expert is divided as any other feed-forward
    return plan


def _has_inner_layer(expert: nn.Module) -> bool:
    """Return whether an expert is divided; other experts are replicated."""
    while isinstance(expert, Chunked):
        expert = expert.inner
    return isinstance(expert, Dense | Gated)


def _keep_local_heads(attention: MultiHeadAttention, mesh: DeviceMesh) -> None:
    """Set the head counts of the module to the local heads, and select their patterns."""
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


def _local_relative_terms(position: Position, mesh: DeviceMesh, *arguments: Any) -> Relative | None:
    """Return the terms of `position.relative` for the local heads, with all-reduced gradients."""
    terms = type(position).relative(position, *arguments)
    if terms is None:
        return None
    heads = arguments[0].shape[1]
    first = mesh.get_local_rank() * heads

    def own(table: Tensor) -> Tensor:
        table = copy_to_group(table, mesh) if table.requires_grad else table
        return table if len(table) == 1 else table[first : first + heads]

    return dataclasses.replace(terms, **{name: own(table) for name, table in terms.tables.items()})


def _check(name: str, stack: Stack, count: int) -> None:
    def refuse(reason: str) -> InputError:
        return InputError(f"tensor: {name or 'the stack'}: {reason}; leave tensor at 1, and use shard")

    if stack.position.adds_terms and not isinstance(stack.position, BY_DISTANCE):
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
    if config.latent is not None:
        raise refuse("latent attention is not divided by heads")
    if config.indexer is not None:
        raise refuse("attention with an indexer is not divided by heads")
    if attention.global_attention is not None:
        raise refuse("global_projections are not divided by heads")
    if not isinstance(attention.mechanism, SoftmaxAttention):
        raise refuse(f"the mechanism {quote(config.mechanism.kind)} is not divided by heads; 'softmax' is")
    for option in ("qk_norm", "output_gate", "head_scale", "value_residual"):
        if getattr(config, option):
            raise refuse(f"{option} is not divided by heads")
    if attention.mechanism.config.sink:
        raise refuse("the sinks of softmax attention are not divided by heads")
    pattern = attention.mechanism.config.pattern
    if contains(pattern, MaskModPattern):
        raise refuse("a mask_mod of one's own may ask for the number of a head")
