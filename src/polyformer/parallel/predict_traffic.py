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
               gradients. Attention by features: every run's sums of keys to all, and an all-reduce back
    pipeline   [B, T, E] to the next stage and its gradient to the one before; and, once a step, gradients of
               weights that several stages have, such as a tied token table
"""

import dataclasses
import itertools
from collections.abc import Mapping

from polyformer.architecture import ModelConfig
from polyformer.attention.adaptive_span import AdaptiveSpanConfig
from polyformer.attention.base import MechanismConfig
from polyformer.dot_product.spread.needs import choose_runs, find_needs
from polyformer.dot_product.spread.run import WORTH_A_RING
from polyformer.feedforward.base import FeedForwardConfig
from polyformer.feedforward.chunked import ChunkedConfig
from polyformer.feedforward.dense import DenseConfig
from polyformer.feedforward.experts import ExpertsConfig
from polyformer.feedforward.gated import GatedConfig
from polyformer.model.spreading import runs_of_stack
from polyformer.parallel.predict_local import Held, divided, own_rows
from polyformer.parallel.stages import spans
from polyformer.patterns.base import Pattern
from polyformer.patterns.implied import implied
from polyformer.sequence.context import Context
from polyformer.sequence.shares import Run, Share
from polyformer.stack import AttentionConfig, StackConfig

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
    `stages` of a pipeline. size: bytes of a number in products. again: whether they are computed twice."""

    batch: int
    length: int
    passes: int
    stages: int
    size: int
    again: bool


def exchanges(config: ModelConfig, sizes: Mapping[str, int], held: Held, work: Work) -> list[Exchange]:
    """Every exchange of a step but those along dimensions of one process; `config` of the whole model."""
    vectors = FLOAT * work.batch * (work.length // sizes["context"]) * config.hidden_size  # [B, T, E]
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
        inside += _vocabulary_sums(config, sizes, vectors, work.size)
        rows.append(Exchange("tensor", "all-reduce of activations", 2 * (n - 1) / n * inside * work.passes))
    if sizes["context"] > 1:
        keys = key_exchanges(divided(config, sizes["tensor"]), sizes, work)
        for what in dict.fromkeys(layer.what for layer in keys):
            own = [layer for layer in keys if layer.what == what]
            read = sum(forward * layer.forward + layer.backward for layer in own)
            back = sum(layer.gradients for layer in own)
            rows += [
                Exchange("context", what, read * work.passes),
                Exchange("context", f"gradients of {what}", back * work.passes),
            ]
    if sizes["pipeline"] > 1:
        hidden = vectors * _passed_on(config, sizes["pipeline"], work.stages) * work.passes
        rows.append(Exchange("pipeline", "hidden states and gradients", hidden))
        if held.shared:
            rows.append(
                Exchange("pipeline", "all-reduce of gradients of shared weights", FLOAT * held.shared)
            )
    return rows


def _passed_on(config: ModelConfig, processes: int, stages: int) -> int:
    """How many vectors [B, T, E] the busiest process of a pipeline sends for a batch, from all its stages:
    hidden states to the next one, where the decoder has begun with the source's, and gradients of as many to
    the one before."""
    layers = sum(stack.num_hidden_layers for stack in _stacks(config))
    source = config.encoder.num_hidden_layers if config.encoder and config.decoder else layers
    edges = [0, *(2 if span.start > source else 1 for span in spans(layers, stages)[1:]), 0]
    sent = [before + after for before, after in itertools.pairwise(edges)]
    return max(sum(sent[process::processes]) for process in range(processes))


def _sums(config: ModelConfig) -> tuple[float, float]:
    """How often vectors [B, T, E] are summed over `tensor`, forward, and their gradients backward."""
    forward, backward = 0.0, 0.0
    for stack in _stacks(config):
        crosses = stack is config.decoder and config.encoder is not None
        for layer in range(stack.num_hidden_layers):
            behind, read = _feedforward_sums(stack.feedforward.at(layer), config.hidden_size)
            forward += (2 if crosses else 1) + behind
            backward += (4 if crosses else 1) + read  # of the source's keys and values, and the queries
    return forward, backward


def _vocabulary_sums(config: ModelConfig, sizes: Mapping[str, int], vectors: int, size: int) -> float:
    """Bytes of the sums over a vocabulary that is divided by `tensor`; vectors: those of [B, T, E]. size: of
    a number of products, one of which the head of a masked language model makes before its loss. In a
    pipeline token vectors and loss are in different stages: the more of the two."""
    if own_rows(config, sizes["tensor"]) == config.vocab_size:
        return 0
    width, shape = config.embedding.width(config.hidden_size), config.head_shape()
    token, loss = width * len(_stacks(config)), 0.0
    if config.head.kind in ("language_model", "masked"):
        part = size / FLOAT if config.head.kind == "masked" else 1
        loss = 3 + part * (shape.table_size or shape.hidden_size)
    return vectors * (max(token, loss) if sizes["pipeline"] > 1 else token + loss) / config.hidden_size


def _feedforward_sums(part: FeedForwardConfig, hidden_size: int) -> tuple[float, float]:
    """The same of one feed-forward; of experts also the gradients of the `top_k` gates of a token."""
    if isinstance(part, ExpertsConfig):
        return 1, 1 + part.top_k / hidden_size
    if isinstance(part, ChunkedConfig):
        return _feedforward_sums(part.inner, hidden_size)
    if isinstance(part, GatedConfig):
        return 1, 2  # its two first matrices read apart
    return (1, 1) if isinstance(part, DenseConfig) else (0, 0)


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of one layer and text that the process which gets most sends or gets: forward, backward, as
    gradients. process: which that is. what: they are."""

    forward: int
    backward: int
    gradients: int
    process: int = 0
    what: str = "keys and values"

    def __mul__(self, number: int) -> "Keys":
        forward, backward, gradients = self.forward, self.backward, self.gradients
        return dataclasses.replace(
            self, forward=number * forward, backward=number * backward, gradients=number * gradients
        )


def exchanged_keys(
    pattern: Pattern | None,
    length: int,
    processes: int,
    causal: bool,
    rings: bool = True,
    runs: tuple[tuple[Run, ...], ...] | None = None,
) -> Keys:
    """What attention over a spread sequence exchanges: the keys that the layout names; or, where it names
    half of them, all of them in a ring, twice, their gradients behind them (Liu et al. 2023, section 3).

    rings: whether the mechanism may, which dropout keeps it from. runs: the slots of every process, by
    default as for a stack of this pattern alone.
    """
    whole = Context(length, length, causal=causal)
    runs = choose_runs([pattern], whole, processes) if runs is None else runs
    shown = implied(whole)
    seen = pattern if shown is None else shown if pattern is None else pattern & shown
    needs = find_needs(seen, whole, Share(None, 0, runs))
    if rings and processes > 2 and needs.part_needed() >= WORTH_A_RING:
        part = -(-length // processes)
        return Keys((processes - 1) * part, (processes - 1) * part, processes * part)
    most = max(range(processes), key=needs.received)
    return Keys(needs.received(most), 0, needs.received(most), most)


def exchanged_sums(own: int, processes: int) -> Keys:
    """What attention exchanges where all processes get the sums of each, which are `own` numbers."""
    sent = (processes - 1) * own
    return Keys(sent, 0, 2 * sent, what="sums of keys")


def key_exchanges(config: ModelConfig, sizes: Mapping[str, int], work: Work) -> list[Keys]:
    """The same in bytes, of all texts, for each attention, the encoder's first.

    config: of one of the `tensor` processes.
    """
    processes, calls = sizes["context"], list[Keys]()
    if processes == 1:
        return calls
    for stack in _stacks(config):
        crosses = stack is config.decoder and config.encoder is not None
        known = dict[tuple[MechanismConfig, bool], Keys]()
        whole = Context(work.length, work.length, causal=stack is config.decoder)
        runs = runs_of_stack(stack, whole, processes)
        for mechanism in map(stack.attention.mechanism.at, range(stack.num_hidden_layers)):
            reads = [(mechanism, whole.causal), *([(mechanism.cross(), False)] if crosses else [])]
            for read in reads:
                if read not in known:
                    known[read] = _exchanged(stack.attention, config.hidden_size, work, *read, runs)
                calls.append(known[read])
    return calls


def _exchanged(
    attention: AttentionConfig,
    hidden_size: int,
    work: Work,
    mechanism: MechanismConfig,
    causal: bool,
    runs: tuple[tuple[Run, ...], ...],
) -> Keys:
    """The bytes of one attention, by keys or by sums over them."""
    width = attention.width(hidden_size)
    heads, kv_heads = attention.num_attention_heads, attention.kv_heads
    own = mechanism.summed(heads, kv_heads, width, work.length)
    if own is not None:
        return exchanged_sums(len(runs[0]) * work.batch * own, len(runs)) * FLOAT
    rings = not getattr(mechanism, "dropout", 0)
    keys = exchanged_keys(_first_pattern(mechanism, heads), work.length, len(runs), causal, rings, runs)
    return keys * (2 * work.batch * kv_heads * width * work.size)


def _first_pattern(mechanism: MechanismConfig, heads: int) -> Pattern | None:
    """The pattern of a mechanism when training begins: spans are learned then."""
    if isinstance(mechanism, AdaptiveSpanConfig):
        return mechanism.pattern_of(heads * [mechanism.initial * mechanism.max_span])
    return getattr(mechanism, "pattern", None)


def _stacks(config: ModelConfig) -> list[StackConfig]:
    return [stack for stack in (config.encoder, config.decoder) if stack is not None]
