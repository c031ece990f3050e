"""The setting of a run, and the part of a model in a process: heads and inner units, layers, shards."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from polyformer.core.errors import InputError, unknown
from polyformer.core.ranges import PositiveInt, check_ranges
from polyformer.models.architectures import Transformer, build_model
from polyformer.models.config import ModelConfig
from polyformer.nn.feedforward.experts import ExpertsConfig
from polyformer.nn.feedforward.feedforward import (
    AlternateFeedForwardConfig,
    ChunkedConfig,
    DenseConfig,
    FeedForwardConfig,
    GatedConfig,
)
from polyformer.nn.heads.adaptive import AdaptiveSoftmax
from polyformer.training.config import DIMENSIONS, ParallelConfig
from polyformer.training.distributed.pipeline_stages import modules_of_layers

FLOAT = 4
"""Bytes of weights, gradients, and vectors between layers."""


def _rows_and_columns(shape: Sequence[int], _: bool) -> int:
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]


STATES: dict[str, Callable[[Sequence[int], bool], int]] = {
    "adam": lambda shape, table: 2 * math.prod(shape),
    "adamw": lambda shape, table: 2 * math.prod(shape),
    "sgd": lambda shape, table: math.prod(shape),
    "sgd without momentum": lambda shape, table: 0,
    "muon": lambda shape, table: (1 if len(shape) == 2 and not table else 2) * math.prod(shape),
    "adafactor": _rows_and_columns,
}
"""Elements of optimizer state for a parameter of a shape; the flag says whether it is an embedding table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The setting in which a model is trained.

    batch: texts per batch, shared by the processes along context and tensor. length: tokens per text. passes:
    batches per step, which are the microbatches of a pipeline. half: bfloat16 autocast. optimizer: a name in
    `STATES`.
    """

    mesh: ParallelConfig = ParallelConfig()
    batch: PositiveInt = 1
    length: PositiveInt = 512
    passes: PositiveInt = 1
    half: bool = True
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.optimizer not in STATES:
            raise unknown("optimizer with a prediction", self.optimizer, STATES)
        self.mesh.check_optimizer(self.optimizer)
        self.mesh.check_accumulated(self.passes)
        if self.length < self.sizes["context"]:
            raise InputError(
                f"context={self.mesh.context}: more processes than the {self.length} tokens of a text"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of processes along each dimension; `data` is 1 by default."""
        data = self.mesh.data or 1
        return {name: data if name == "data" else getattr(self.mesh, name) for name in DIMENSIONS}

    @property
    def product_bytes(self) -> int:
        """Return the bytes per element in products."""
        return 2 if self.half else FLOAT

    @property
    def world(self) -> int:
        """Return the number of all processes."""
        return math.prod(self.sizes.values())

    @property
    def tokens(self) -> int:
        """Return the tokens per step, over all processes."""
        return self.batch * self.length * self.passes * self.sizes["data"] * self.sizes["shard"]


@dataclasses.dataclass(frozen=True)
class LocalParameters:
    """Numbers of elements in the parameters of a process, before and after sharding over `shard`.

    whole: all parameters of its layers. part: its shard of them. layer: the largest layer. rest: outside of
    layers, including the token tables. state: optimizer state of its shard. shared: elements sent for the
    gradients of weights that other pipeline stages also have.
    """

    whole: int
    part: int
    layer: int
    rest: int
    state: int
    shared: float


def tensor_parallel_config(config: ModelConfig, tensor: int) -> ModelConfig:
    """Return the config of the model in one of `tensor` processes, with fewer heads and inner units.

    Queries, keys, values and the first matrices of a feed-forward are divided by their outputs, the others by
    their inputs, a vocabulary by its rows (Shoeybi et al. 2019, section 3); norms and residual vectors are
    replicated. The sizes must be divisible (`tensor.check_tensor_parallel`).
    """
    if tensor == 1:
        return config
    changes: dict[str, Any] = {"vocab_size": local_vocabulary_rows(config, tensor)}
    for name in ("encoder", "decoder"):
        stack = getattr(config, name)
        if stack is not None:
            attention = stack.attention
            changes[name] = dataclasses.replace(
                stack,
                attention=dataclasses.replace(
                    attention,
                    num_attention_heads=attention.num_attention_heads // tensor,
                    num_key_value_heads=attention.kv_heads // tensor,
                    head_size=attention.width(config.hidden_size),
                ),
                feedforward=_narrow(stack.feedforward, tensor),
            )
    return dataclasses.replace(config, **changes)


def local_vocabulary_rows(config: ModelConfig, tensor: int) -> int:
    """Return the rows of the token table in the first of `tensor` processes; all if it is not divided."""
    with torch.device("meta"):
        head = config.head.build(config.head_shape())
    whole = (
        config.embedding.adaptive is not None
        or isinstance(head, AdaptiveSoftmax)
        or not head.supports_vocabulary_parallel
    )
    return config.vocab_size if whole else -(-config.vocab_size // tensor)


def _narrow(part: FeedForwardConfig, tensor: int) -> FeedForwardConfig:
    """Return a feed-forward with inner units divided by `tensor`, or unchanged if it cannot be divided."""
    if isinstance(part, DenseConfig | GatedConfig):
        return dataclasses.replace(part, intermediate_size=part.intermediate_size // tensor)
    if isinstance(part, ExpertsConfig):
        shared = None if part.shared_expert is None else _narrow(part.shared_expert, tensor)
        return dataclasses.replace(part, expert=_narrow(part.expert, tensor), shared_expert=shared)
    if isinstance(part, ChunkedConfig):
        return dataclasses.replace(part, inner=_narrow(part.inner, tensor))
    if isinstance(part, AlternateFeedForwardConfig):
        return dataclasses.replace(
            part, feedforwards=tuple(_narrow(each, tensor) for each in part.feedforwards)
        )
    return part


def meta_model(config: ModelConfig) -> Transformer:
    """Return the model of `config`, in floating point, on the `meta` device."""
    with torch.device("meta"):
        model = build_model(dataclasses.replace(config, weights=None))
    assert isinstance(model, Transformer)
    return model


def count_local_parameters(
    model: Transformer, process: int, layers: Sequence[list[range]], shard: int, optimizer: str
) -> LocalParameters:
    """Return the part of `model` in a process; `model` is the whole model of its `tensor` processes.

    layers: the layers of each process along the pipeline, indexed by `process`.

    Along `shard` (with `context`, which also shards weights) the first dimension of every tensor is split
    into equal parts. The last parts may be smaller and are then padded (torch's `fully_shard`): this counts
    the part of the first process, and assumes the same size for all others.
    """
    every = [
        _parameters(modules_of_layers(model, ranges) if len(layers) > 1 else [model]) for ranges in layers
    ]
    own = every[process]
    shapes = {parameter: _share(parameter.shape, shard) for parameter in own}
    sizes = {parameter: math.prod(shape) for parameter, shape in shapes.items()}
    inside = [{*layer.parameters()} & own for layer in layers_of(model)]
    rest = own - set[nn.Parameter]().union(*inside)
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    owners = {parameter: sum(parameter in others for others in every) for parameter in own}
    return LocalParameters(
        whole=shard * sum(sizes.values()),
        part=sum(sizes.values()),
        layer=shard * max(sum(sizes[parameter] for parameter in layer) for layer in inside),
        rest=shard * sum(sizes[parameter] for parameter in rest),
        state=sum(STATES[optimizer](shape, parameter in tables) for parameter, shape in shapes.items()),
        shared=sum(2 * (n - 1) / n * sizes[parameter] for parameter, n in owners.items()),
    )


def _parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}


def _share(shape: Sequence[int], shard: int) -> tuple[int, ...]:
    """Return the shape of the first process's shard of a parameter."""
    return (-(-shape[0] // shard), *shape[1:]) if shape else ()


def layers_of(model: Transformer) -> list[nn.Module]:
    """Return the modules of all layers, the encoder first; layers that share weights appear once."""
    return [layer for stack in (model.encoder, model.decoder) if stack is not None for layer in stack.layers]
