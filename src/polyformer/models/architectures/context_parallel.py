"""Context parallelism of a model: checks of parts that do not support it, and the loss of whole sequences."""

import torch
from torch import Tensor

from polyformer.attention.functional.key_exchange import choose_runs, total
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import IGNORED
from polyformer.core.sequence.context import Context, Run, SequenceShard
from polyformer.core.sequence.context_parallel import ContextParallel
from polyformer.nn.heads import Head
from polyformer.nn.memory import NoMemoryConfig
from polyformer.nn.stack import Stack, StackConfig


def check_context_parallel(config: StackConfig, stack: Stack, head: Head, kind: str) -> None:
    """Raise `InputError` for parts of a stack that need tokens of other ranks.

    kind: the head's.
    """
    config.attention.mechanism.require("supports_context_parallel")
    # Layers may differ, for example with experts in every second.
    feedforwards = [config.feedforward.for_layer(layer) for layer in range(config.num_hidden_layers)]
    refused = {
        "memory": None if isinstance(config.memory, NoMemoryConfig) else config.memory.kind,
        "depth": None if stack.depth is None else config.depth.kind,
        "feedforward": next(
            (part.kind for part in feedforwards if not (part.tokenwise or part.exchanges)), None
        ),
        "norm": None if config.norm.tokenwise else config.norm.kind,
        "head": None if head.supports_context_parallel else kind,
        "convolution": None if config.convolution is None else "convolution",
        "global_projections": "true" if config.attention.global_projections else None,
        "indexer": None if config.attention.indexer is None else "indexer",
        "beside": None if config.attention.beside is None else config.attention.beside.second.kind,
        "layerdrop": "above 0" if config.layerdrop and stack.training else None,
    }
    for name, value in refused.items():
        if value is not None:
            raise InputError(
                f"{name}: {quote(value)} does not support context parallelism, as it needs tokens of other "
                "ranks; choose another, or leave parallel.context at 1"
            )


def choose_shard(over: ContextParallel, whole: Context, config: StackConfig) -> SequenceShard:
    """Return this rank's shard of the sequence, the same in all layers."""
    return SequenceShard(over.group, over.rank, runs_of_stack(config, whole, over.processes), over.strategy)


def runs_of_stack(config: StackConfig, whole: Context, processes: int) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of slots of every process, for all layers of a stack."""
    mechanisms = [config.attention.mechanism.for_layer(layer) for layer in range(config.num_hidden_layers)]
    # The runs must suit all layers, so all patterns are considered.
    patterns = {part.pattern for part in mechanisms if isinstance(part, SoftmaxConfig)}
    return choose_runs(patterns, whole, processes)


def mean_loss_over_group(loss: Tensor, labels: Tensor | None, shard: SequenceShard | None) -> Tensor:
    """Return the mean over the labelled tokens of the whole sequence, from the mean `loss` over this
    process's.

    labels: of this process's tokens. The value is the mean of the whole sequence. The gradient is of this
    process's part times the number of processes, so that the mean of the gradients over the processes is the
    gradient of the whole.
    """
    if shard is None or labels is None:
        return loss
    count = (labels != IGNORED).sum()
    # Without labels the mean is 0 / 0, so it is replaced by 0 before the sum.
    own = torch.where(count > 0, loss.detach(), 0.0).double() * count
    whole = total(torch.stack([own, count.double()]), shard)
    part = loss * (count * len(shard.runs) / whole[1].clamp_min(1)).to(loss.dtype)
    return part + ((whole[0] / whole[1].clamp_min(1)).to(loss.dtype) - part).detach()
