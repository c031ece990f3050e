"""Prediction of the memory per process and the communication per step of a training run.

    memory = parameters + gradients + optimizer (4 + 4 + 8 bytes per parameter for Adam, divided by `shard`)
           + gathered weights (`shard`: two layers, weights outside of layers, and the gradients of a layer)
           + activations (`predict_activations`), for the number of passes in flight (`peak_activations`)

The sum counts gradients and activations in full, although gradients are complete only when the activations
are freed, except for accumulation. It leaves out temporary tensors of operations, such as a chunk of logits.
Rajbhandari et al. 2020 (ZeRO), section 3; Korthikanti et al. 2022, section 4.

The communication is counted in bytes that a process sends in one step, by type; it receives the same number.
For n processes in a ring and N bytes in total: an all-gather and a reduce-scatter send (n - 1) / n N each, an
all-reduce both, 2 (n - 1) / n N (ZeRO, section 7).

    shard      (and context, which also shards weights) weights of each layer twice per pass, forward and
               backward, all others once; gradients once: stage 3 of ZeRO, 3 (n - 1) / n N instead of
               2 (n - 1) / n N in data parallelism
    data       gradients, or the shards of them that `shard` leaves, once per step
    tensor     all-reduces of [B, T, E]: forward after each sub-layer, in the precision of products, and
               again where layers are recomputed; backward, in float32, before each sub-layer, once for all
               fused projections (Shoeybi et al. 2019, section 3, figure 4); for a divided vocabulary
               [B, T, E] of the token vectors, and three numbers per token and [B, T, E] of the loss
    context    the keys and values that the layout of the pattern requires, or all of them in a ring; and
               their gradients back. Attention by feature maps: the sums of keys of every run to all
               processes, and an all-reduce back
    pipeline   [B, T, E] to the next stage and its gradient to the previous; and, once per step, gradients of
               weights that several stages share, such as a tied token table
"""

import dataclasses
import itertools
from collections.abc import Mapping

from polyformer.attention.functional.context_parallel import WORTH_A_RING
from polyformer.attention.functional.key_exchange import choose_runs, find_needs
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.mechanisms.spans import AdaptiveSpanConfig
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import implied
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.sequence.context import Context, Run, SequenceShard
from polyformer.core.sequence.context_parallel import ContextParallel
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.context_parallel import runs_of_stack
from polyformer.models.config import ModelConfig
from polyformer.nn.feedforward.experts import ExpertsConfig
from polyformer.nn.feedforward.feedforward import ChunkedConfig, DenseConfig, FeedForwardConfig, GatedConfig
from polyformer.nn.stack import AttentionConfig, StackConfig
from polyformer.training.config import DIMENSIONS, ParallelConfig
from polyformer.training.distributed.pipeline_stages import check_pipelined, num_layers, stacks, stage_spans
from polyformer.training.distributed.predict_activations import (
    SavedActivations,
    loss_bytes,
    peak_activations,
    trace_activations,
)
from polyformer.training.distributed.predict_local import (
    FLOAT,
    LocalParameters,
    TrainingSetup,
    count_local_parameters,
    local_vocabulary_rows,
    meta_model,
    tensor_parallel_config,
)
from polyformer.training.distributed.tensor_parallel import check_tensor_parallel


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Bytes that the busiest process sends in a step. dimension: of the mesh."""

    dimension: str
    what: str
    sent: float


def exchanges(
    config: ModelConfig, setting: TrainingSetup, held: LocalParameters, again: bool
) -> list[Exchange]:
    """Return the communication of a step along every dimension of the mesh with several processes.

    again: whether layers are recomputed.
    """
    sizes, passes = setting.sizes, setting.passes
    vectors = FLOAT * setting.batch * (setting.length // sizes["context"]) * config.hidden_size  # [B, T, E]
    forward = 2 if again else 1
    rows = []
    if (n := sizes["shard"] * sizes["context"]) > 1:
        share, layers = (n - 1) / n, held.whole - held.rest
        along = "shard" if sizes["context"] == 1 else "shard x context"
        weights = FLOAT * share * (2 * layers + held.rest) * passes
        rows += [
            Exchange(along, "all-gather of weights", weights),
            Exchange(along, "reduce-scatter of gradients", FLOAT * share * held.whole * passes),
        ]
    if (n := sizes["data"]) > 1:
        rows.append(Exchange("data", "all-reduce of gradients", 2 * (n - 1) / n * FLOAT * held.part))
    if (n := sizes["tensor"]) > 1:
        sums, gradients = (number / sizes["pipeline"] for number in _sums(config))
        inside = vectors * (forward * sums * setting.product_bytes / FLOAT + gradients)
        inside += _vocabulary_sums(config, sizes, vectors, setting.product_bytes)
        rows.append(Exchange("tensor", "all-reduce of activations", 2 * (n - 1) / n * inside * passes))
    if sizes["context"] > 1:
        keys = key_exchanges(tensor_parallel_config(config, sizes["tensor"]), setting)
        for what in dict.fromkeys(layer.what for layer in keys):
            own = [layer for layer in keys if layer.what == what]
            read = sum(forward * layer.forward + layer.backward for layer in own)
            back = sum(layer.gradients for layer in own)
            rows += [
                Exchange("context", what, read * passes),
                Exchange("context", f"gradients of {what}", back * passes),
            ]
    if sizes["pipeline"] > 1:
        hidden = vectors * _passed_on(config, sizes["pipeline"], setting.mesh.stages) * passes
        rows.append(Exchange("pipeline", "hidden states and gradients", hidden))
        if held.shared:
            rows.append(
                Exchange("pipeline", "all-reduce of gradients of shared weights", FLOAT * held.shared)
            )
    return rows


def _passed_on(config: ModelConfig, processes: int, per_process: int) -> int:
    """Return the number of vectors [B, T, E] that the busiest process of a pipeline sends per batch.

    They are hidden states to the next stages, in the decoder together with those from the source, and the
    same number of gradients to the previous stages, for all its stages.
    """
    layers = sum(stack.num_hidden_layers for stack in _stacks(config))
    source = config.encoder.num_hidden_layers if config.encoder and config.decoder else layers
    edges = [
        0,
        *(2 if span.start > source else 1 for span in stage_spans(layers, processes * per_process)[1:]),
        0,
    ]
    sent = [before + after for before, after in itertools.pairwise(edges)]
    return max(sum(sent[process::processes]) for process in range(processes))


def _sums(config: ModelConfig) -> tuple[float, float]:
    """Return the numbers of all-reduces of [B, T, E] over `tensor`: forward, and of gradients backward."""
    forward, backward = 0.0, 0.0
    for stack in _stacks(config):
        crosses = stack is config.decoder and config.encoder is not None
        for layer in range(stack.num_hidden_layers):
            behind, read = _feedforward_sums(stack.feedforward.for_layer(layer), config.hidden_size)
            forward += (2 if crosses else 1) + behind
            backward += (4 if crosses else 1) + read  # keys and values of the source, and queries
    return forward, backward


def _vocabulary_sums(config: ModelConfig, sizes: Mapping[str, int], vectors: int, size: int) -> float:
    """Return the bytes of the all-reduces over a vocabulary that is divided by `tensor`.

    vectors: the bytes of [B, T, E]. size: bytes per element in products; the head of a masked language model
    computes a product before its loss. In a pipeline token vectors and loss are in different stages: the
    result is the larger of the two.
    """
    if local_vocabulary_rows(config, sizes["tensor"]) == config.vocab_size:
        return 0
    width, shape = config.embedding.width(config.hidden_size), config.head_shape()
    token, loss = width * len(_stacks(config)), 0.0
    if config.head.kind in ("language_model", "masked"):
        part = size / FLOAT if config.head.kind == "masked" else 1
        loss = 3 + part * (shape.table_size or shape.hidden_size)
    return vectors * (max(token, loss) if sizes["pipeline"] > 1 else token + loss) / config.hidden_size


def _feedforward_sums(part: FeedForwardConfig, hidden_size: int) -> tuple[float, float]:
    """Return the same for one feed-forward; experts also sum the gradients of `top_k` gates per token."""
    if isinstance(part, ExpertsConfig):
        shared = part.shared_expert
        forward, backward = (0, 0) if shared is None else _feedforward_sums(shared, hidden_size)
        return forward + 1, backward + 1 + part.top_k / hidden_size
    if isinstance(part, ChunkedConfig):
        return _feedforward_sums(part.inner, hidden_size)
    if isinstance(part, GatedConfig):
        return 1, 2  # its first two matrices communicate separately
    return (1, 1) if isinstance(part, DenseConfig) else (0, 0)


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of one layer and text that the busiest process sends or receives.

    They are counted in the forward pass, the backward pass, and as gradients. process: the busiest process.
    what: the type of the data.
    """

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
    """Return the keys that attention over a spread sequence communicates: the keys required by the layout.

    If the layout requires half of the keys, all of them are sent in a ring instead, twice, followed by their
    gradients (Liu et al. 2023, section 3). rings: whether the mechanism supports this; dropout does not.
    runs: the slots of every process, by default as for a stack with only this pattern.
    """
    whole = Context(length, length, causal=causal)
    runs = choose_runs([pattern], whole, processes) if runs is None else runs
    shown = implied(whole)
    seen = pattern if shown is None else shown if pattern is None else pattern & shown
    needs = find_needs(seen, whole, SequenceShard(None, 0, runs))
    if rings and processes > 2 and needs.part_needed() >= WORTH_A_RING:
        part = -(-length // processes)
        return Keys((processes - 1) * part, (processes - 1) * part, processes * part)
    most = max(range(processes), key=needs.received)
    return Keys(needs.received(most), 0, needs.received(most), most)


def key_exchanges(config: ModelConfig, setting: TrainingSetup) -> list[Keys]:
    """Return the bytes of keys, for all texts, for each attention, the encoder first.

    config: of one of the `tensor` processes.
    """
    processes, calls = setting.mesh.context, list[Keys]()
    if processes == 1:
        return calls
    for stack in _stacks(config):
        crosses = stack is config.decoder and config.encoder is not None
        known = dict[tuple[MechanismConfig, bool], Keys]()
        whole = Context(setting.length, setting.length, causal=stack is config.decoder)
        runs = runs_of_stack(stack, whole, processes)
        for mechanism in map(stack.attention.mechanism.for_layer, range(stack.num_hidden_layers)):
            reads = [
                (mechanism, whole.causal),
                *([(mechanism.cross(config.cross_attention), False)] if crosses else []),
            ]
            for read in reads:
                if read not in known:
                    known[read] = _exchanged(stack.attention, config.hidden_size, setting, *read, runs)
                calls.append(known[read])
    return calls


def _exchanged(
    attention: AttentionConfig,
    hidden_size: int,
    setting: TrainingSetup,
    mechanism: MechanismConfig,
    causal: bool,
    runs: tuple[tuple[Run, ...], ...],
) -> Keys:
    """Return the bytes of one attention, either keys or sums over them."""
    width = attention.width(hidden_size)
    heads, kv_heads = attention.num_attention_heads, attention.kv_heads
    own = mechanism.all_gathered_elements(heads, kv_heads, width, setting.length, causal)
    if own is not None:
        sent = FLOAT * (len(runs) - 1) * len(runs[0]) * setting.batch * own  # from each process to all others
        return Keys(sent, 0, 2 * sent, what="sums of keys")
    rings = not getattr(mechanism, "dropout", 0)
    keys = exchanged_keys(_first_pattern(mechanism, heads), setting.length, len(runs), causal, rings, runs)
    return keys * (2 * setting.batch * kv_heads * width * setting.product_bytes)


def _first_pattern(mechanism: MechanismConfig, heads: int) -> Pattern | None:
    """Return the pattern of a mechanism at the start of training; learned spans change later."""
    if isinstance(mechanism, AdaptiveSpanConfig):
        return mechanism.pattern_of(heads * [mechanism.initial * mechanism.max_span])
    return getattr(mechanism, "pattern", None)


def _stacks(config: ModelConfig) -> list[StackConfig]:
    return [stack for stack in (config.encoder, config.decoder) if stack is not None]


PIPELINE_OPTIONS = "stages", "pipeline_schedule"
"""Options of a pipeline in addition to the number of processes."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one process; `recomputed`: activations with activation checkpointing."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    recomputed: int

    def total(self, again: bool) -> int:
        """Return the sum; `again`: with activation checkpointing."""
        still = self.parameters + self.gradients + self.optimizer + self.gathered
        return still + (self.recomputed if again else self.activations)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The memory of the process that needs most, and the communication without and with recomputation.

    stage: the rank of this process along the pipeline, from 0. Recomputation communicates more.
    """

    stage: int
    memory: Memory
    exchanges: list[Exchange]
    exchanges_again: list[Exchange]


def predict(config: ModelConfig, setting: TrainingSetup) -> Prediction:
    """Return the memory and the communication of a process that trains a model of `config`.

    Raises `InputError` where training on this mesh would, and for a model with saved activations that depend
    on computed values.
    """
    sizes = setting.sizes
    whole = meta_model(config)
    check_mesh(whole, sizes)
    own = tensor_parallel_config(config, sizes["tensor"])
    model = whole if own is config else meta_model(own)
    processes = sizes["pipeline"]
    stages = stage_spans(num_layers(model), processes * setting.mesh.stages)
    over, joins = _busiest_context_rank(own, setting), own is config
    traced = trace_activations(own, setting.batch, setting.length, setting.half, over, joins)
    candidates = []
    every = [stages[process::processes] for process in range(processes)]
    for process in {0, processes - 1}:
        part = count_local_parameters(
            model, process, every, sizes["shard"] * sizes["context"], setting.optimizer
        )
        inside = _activations(own, traced, process, every[process], len(traced.layers), setting)
        candidates.append((process, part, _memory(part, sizes, *inside)))
    stage, part, memory = max(candidates, key=lambda item: item[2].total(again=False))
    sent, sent_again = (exchanges(config, setting, part, again) for again in (False, True))
    return Prediction(stage, memory, sent, sent_again)


def _busiest_context_rank(own: ModelConfig, setting: TrainingSetup) -> ContextParallel | None:
    """Return the process along `context` that receives most keys; None without context parallelism."""
    if setting.mesh.context == 1:
        return None
    most = max(key_exchanges(own, setting), key=lambda keys: keys.forward)
    return ContextParallel(None, most.process, setting.mesh.context)


def check_mesh(model: Transformer, sizes: Mapping[str, int]) -> None:
    """Raise the `InputError` of training on this mesh if it cannot shard `model`."""
    if sizes["context"] > 1:
        for name in stacks(model):
            model.runner(name).check_context_parallel()
    if sizes["tensor"] > 1:
        check_tensor_parallel(model, sizes["tensor"])
    if sizes["pipeline"] > 1:
        check_pipelined(model)


def _memory(part: LocalParameters, sizes: dict[str, int], activations: int, recomputed: int) -> Memory:
    whole = FLOAT * (part.rest + 2 * part.layer + part.layer) if sizes["shard"] * sizes["context"] > 1 else 0
    own = FLOAT * part.part
    return Memory(own, own, FLOAT * part.state, whole, activations, recomputed)


def _activations(
    config: ModelConfig,
    traced: SavedActivations,
    process: int,
    own: list[range],
    layers: int,
    setting: TrainingSetup,
) -> tuple[int, int]:
    """Return the maximum bytes of activations of a process of the pipeline, without and with recomputation.

    own: the layers of its stages, of `layers` in total; embedding and loss are included in the first and last
    stage. Recomputation keeps only the inputs of layers, and the activations of a single layer.
    """
    tokens = setting.batch * -(-setting.length // setting.sizes["context"])
    costs, inputs = [], []
    for span in own:
        around = traced.before if span.start == 0 else 0
        around += traced.after + loss_bytes(config, tokens) if span.stop == layers else 0
        costs.append(around + sum(traced.layers[layer] for layer in span))
        inputs.append(around + sum(traced.inputs[layer] for layer in span))
    largest = max(traced.layers[layer] - traced.inputs[layer] for span in own for layer in span)
    way = process, setting.sizes["pipeline"], setting.passes, setting.mesh.pipeline_schedule
    return peak_activations(costs, *way), peak_activations(inputs, *way) + largest


def parse_mesh(text: str) -> ParallelConfig:
    """Parse a mesh such as "data=8,shard=8"; raises `InputError` for other text."""
    values: dict[str, int | str] = {}
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in (*DIMENSIONS, *PIPELINE_OPTIONS):
            raise unknown("dimension of the mesh", name, (*DIMENSIONS, *PIPELINE_OPTIONS))
        if name in values or not (value.isdigit() or name == "pipeline_schedule"):
            raise InputError(f"mesh: expected {name}=N once, with a number of processes, got {quote(text)}")
        values[name] = int(value) if value.isdigit() else value
    return ParallelConfig.from_dict(values, "mesh")
