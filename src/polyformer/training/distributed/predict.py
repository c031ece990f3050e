"""Prediction of the memory per process and the communication per step of a training run.

    memory = parameters + gradients + optimizer (4 + 4 + 8 bytes per parameter for Adam, divided by `shard`)
           + gathered weights (`shard`: two layers, weights outside of layers, and the gradients of a layer)
           + activations (`predict_trace`), for the number of passes in flight (`peak_activations`)

The sum is an upper bound: gradients are complete only when the activations are freed, except for
accumulation. Rajbhandari et al. 2020 (ZeRO), section 3; Korthikanti et al. 2022, section 4.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.sequence.context_parallel import ContextParallel
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.training.config import DIMENSIONS, ParallelConfig, PipelineSchedule
from polyformer.training.distributed.pipeline_stages import check_pipelined, num_layers, stacks, stage_spans
from polyformer.training.distributed.predict_local import (
    FLOAT,
    LocalParameters,
    TrainingSetup,
    count_local_parameters,
    meta_model,
    tensor_parallel_config,
)
from polyformer.training.distributed.predict_trace import SavedActivations, trace_activations
from polyformer.training.distributed.predict_traffic import Exchange, exchanges, key_exchanges
from polyformer.training.distributed.tensor_parallel import check_tensor_parallel

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
    traced = trace_activations(
        own, setting.batch, setting.length, setting.half, _busiest_context_rank(own, setting)
    )
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


def loss_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the bytes that the chunked loss over the vocabulary keeps of `tokens` labelled tokens.

    They are the gradients of hidden states and output matrix, which the forward pass computes, and the hidden
    states themselves. The loss does not keep its logits. 0 for heads that predict few labels. A masked
    language model labels one token in seven: gradients count for all tokens, hidden states for none.
    """
    if config.head.kind not in ("language_model", "masked"):
        return 0
    shape = config.head_shape()
    rows = shape.vocab_size + (2 * tokens if config.head.kind == "language_model" else tokens)
    return FLOAT * (shape.table_size or shape.hidden_size) * rows


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


def peak_activations(
    costs: Sequence[int], process: int, processes: int, passes: int, schedule: PipelineSchedule
) -> int:
    """Return the maximum bytes that a process keeps at once in a step of `passes` microbatches.

    Passes in flight: "gpipe" keeps all passes of a step; "1f1b" a pass for each stage from the current to the
    last, with several stages those started in the interleaved order. Narayanan et al. 2021, section 2.2.

    costs: bytes of one pass, for each of its stages in order. process: its rank along the pipeline.
    """
    if schedule == "gpipe":
        return passes * sum(costs)
    if len(costs) == 1:
        return min(processes - process, passes) * costs[0]
    together = passes // max(1, passes // processes)  # consecutive microbatches of one stage
    warm_up = (len(costs) - 1) * together + 2 * (processes - 1 - process)
    kept = most = 0
    for number in range(len(costs) * passes):
        kept += costs[number // together % len(costs)]
        most = max(most, kept)
        if number >= warm_up:
            kept -= costs[-1 - (number - warm_up) // together % len(costs)]
    return most
