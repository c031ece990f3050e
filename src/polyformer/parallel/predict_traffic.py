"""How many bytes a process sends in one step, by what they are; it receives as many.

Of n processes in a ring, with N bytes in the whole: an all-gather and a reduce-scatter send (n - 1) / n N
each, an all-reduce both, 2 (n - 1) / n N (Rajbhandari et al. 2020 (ZeRO), section 7).

    shard      (and context, which divides weights too) every layer's weights twice in a pass, forward and
               backward, all others once; its gradients once: ZeRO's third stage, 3 (n - 1) / n N where data
               parallelism has 2
    data       gradients, or the parts of them that `shard` leaves, once a step
    tensor     all-reduces of [B, T, E]: forward behind each sub-layer, in the precision of products, and
               again where layers are computed again; backward, in float32, before each sub-layer, once for
               what is projected together (Shoeybi et al. 2019, section 3, figure 4); of a divided vocabulary
               [B, T, E] of the token vectors, and three numbers a token and [B, T, E] of the loss
    context    the keys and values that the layout of the pattern names, or all in a ring; and back their
               gradients
    pipeline   [B, T, E] to the next stage and its gradient to the one before
"""

import dataclasses
from collections.abc import Mapping

from polyformer.architecture import ModelConfig
from polyformer.dot_product.spread.needs import choose_runs, find_needs
from polyformer.dot_product.spread.run import WORTH_A_RING
from polyformer.feedforward.gated import GatedConfig
from polyformer.parallel.predict_local import Held, divided, own_rows
from polyformer.patterns.base import Pattern
from polyformer.patterns.implied import implied
from polyformer.sequence.context import Context
from polyformer.sequence.shares import Run, Share
from polyformer.stack import StackConfig

FLOAT = 4
"""Bytes of weights, gradients, and vectors between layers."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Bytes that the process which sends most sends in a step. dimension: of the mesh."""

    dimension: str
    what: str
    sent: float


@dataclasses.dataclass(frozen=True)
class Work:
    """What passes through a process in a step: `passes` batches of `batch` texts of `length` tokens, through
    `layers` layers, whose products have numbers of `size` bytes; `again`: whether they are computed twice."""

    batch: int
    length: int
    passes: int
    size: int
    again: bool


def exchanges(config: ModelConfig, sizes: Mapping[str, int], held: Held, work: Work) -> list[Exchange]:
    """Every exchange of a step but those along dimensions of one process; `config` of the whole model."""
    own = work.length // sizes["context"]
    vectors = FLOAT * work.batch * own * config.hidden_size  # [B, T, E]
    forward = 2 if work.again else 1
    rows = []
    if (n := sizes["shard"] * sizes["context"]) > 1:
        share, layers = (n - 1) / n, held.whole - held.rest
        along = "shard" if sizes["context"] == 1 else "shard x context"
        weights = FLOAT * share * (2 * layers + held.rest) * work.passes
        rows += [
            Exchange(along, "all-gather of weights", weights),
            Exchange(along, "reduce-scatter of gradients", FLOAT * share * held.whole * work.passes),
        ]
    if (n := sizes["data"]) > 1:
        rows.append(Exchange("data", "all-reduce of gradients", 2 * (n - 1) / n * FLOAT * held.part))
    if (n := sizes["tensor"]) > 1:
        sums, gradients = (number / sizes["pipeline"] for number in _sums(config))
        inside = vectors * (forward * sums * work.size / FLOAT + gradients)
        inside += _vocabulary_sums(config, n, vectors)
        rows.append(Exchange("tensor", "all-reduce of activations", 2 * (n - 1) / n * inside * work.passes))
    if sizes["context"] > 1:
        keys = key_exchanges(divided(config, sizes["tensor"]), sizes, work)
        read = sum(forward * layer.forward + layer.backward for layer in keys)
        rows += [
            Exchange("context", "keys and values", read * work.passes),
            Exchange("context", "gradients of keys and values", sum(x.gradients for x in keys) * work.passes),
        ]
    if sizes["pipeline"] > 1:
        rows.append(Exchange("pipeline", "hidden states and gradients", 2 * vectors * work.passes))
    return rows


def _sums(config: ModelConfig) -> tuple[int, int]:
    """How often vectors [B, T, E] are summed over `tensor`, forward, and their gradients backward."""
    forward = backward = 0
    for stack in _stacks(config):
        crosses = stack is config.decoder and config.encoder is not None
        read = 2 if isinstance(stack.feedforward, GatedConfig) else 1  # its two first matrices read apart
        forward += stack.num_hidden_layers * (3 if crosses else 2)
        backward += stack.num_hidden_layers * (1 + read + (3 if crosses else 0))  # q; k and v of the source
    return forward, backward


def _vocabulary_sums(config: ModelConfig, tensor: int, vectors: int) -> float:
    """Bytes of the sums over a vocabulary that is divided by `tensor`; vectors: those of [B, T, E]."""
    if own_rows(config, tensor) == config.vocab_size:
        return 0
    width, shape = config.embedding.width(config.hidden_size), config.head_shape()
    token = width * len(_stacks(config))
    if config.head.kind in ("language_model", "masked"):
        token += 3 + (shape.table_size or shape.hidden_size)
    return vectors * token / config.hidden_size


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of one layer and text that the process which gets most sends or gets: forward, backward, as
    gradients; and how many of others it keeps for the backward pass."""

    forward: int
    backward: int
    gradients: int
    kept: int

    def __mul__(self, number: int) -> "Keys":
        return Keys(*(number * value for value in dataclasses.astuple(self)))


NONE = Keys(0, 0, 0, 0)


def exchanged_keys(
    pattern: Pattern | None,
    length: int,
    processes: int,
    causal: bool,
    rings: bool = True,
    runs: tuple[tuple[Run, ...], ...] | None = None,
) -> Keys:
    """What attention over a spread sequence exchanges: the keys that the layout names, which stay until the
    backward pass; or, where it names half of them, all of them in a ring, twice, their gradients behind them
    (Liu et al. 2023, section 3). rings: whether the mechanism may, which dropout keeps it from. runs: the
    slots of every process, by default as for a stack of this pattern alone."""
    whole = Context(length, length, causal=causal)
    runs = choose_runs([pattern], whole, processes) if runs is None else runs
    shown = implied(whole)
    seen = pattern if shown is None else shown if pattern is None else pattern & shown
    needs = find_needs(seen, whole, Share(None, 0, runs))
    if rings and processes > 2 and needs.part_needed() >= WORTH_A_RING:
        part = -(-length // processes)
        return Keys((processes - 1) * part, (processes - 1) * part, processes * part, 0)
    most = max(needs.received(rank) for rank in range(processes))
    return Keys(most, 0, most, most)


def key_exchanges(config: ModelConfig, sizes: Mapping[str, int], work: Work) -> list[Keys]:
    """The same in bytes of keys and values, of all texts, for each layer, the encoder's first.

    config: of one of the `tensor` processes.
    """
    layers = list[Keys]()
    for stack in _stacks(config):
        attention, known = stack.attention, dict[Pattern | None, Keys]()
        width = attention.kv_heads * attention.width(config.hidden_size)
        pattern = getattr(attention.mechanism, "pattern", None)
        patterns = [
            None if pattern is None else pattern.layer_pattern(layer)
            for layer in range(stack.num_hidden_layers)
        ]
        causal = stack is config.decoder
        whole = Context(work.length, work.length, causal=causal)
        runs = choose_runs({*patterns}, whole, sizes["context"])
        rings = not getattr(attention.mechanism, "dropout", 0)
        for own in patterns:
            if own not in known:
                known[own] = (
                    exchanged_keys(own, work.length, sizes["context"], causal, rings, runs)
                    if sizes["context"] > 1
                    else NONE
                )
            layers.append(known[own] * (2 * work.batch * width * work.size))
    return layers


def _stacks(config: ModelConfig) -> list[StackConfig]:
    return [stack for stack in (config.encoder, config.decoder) if stack is not None]
