"""What a training needs of each process, before it runs: memory, and bytes exchanged in a step.

    memory = parameters + gradients + optimizer (4 + 4 + 8 bytes a parameter for Adam, divided by `shard`)
           + gathered weights (`shard`: two layers and what is in no layer, and a layer's gradients)
           + activations (`predict_trace`), of as many passes as a pipeline's stages keep (`predict_schedule`)

The sum is an upper bound: gradients are whole when activations are gone, but for what is accumulated.
Rajbhandari et al. 2020 (ZeRO), section 3; Korthikanti et al. 2022, section 4.
"""

import dataclasses
import math
from collections.abc import Mapping

from polyformer.architecture import ModelConfig
from polyformer.core.errors import InputError, quote, unknown
from polyformer.model import Transformer
from polyformer.parallel.config import DIMENSIONS, ParallelConfig
from polyformer.parallel.predict_local import STATES, Held, divided, held, on_meta
from polyformer.parallel.predict_schedule import most_kept
from polyformer.parallel.predict_trace import Kept, kept
from polyformer.parallel.predict_traffic import FLOAT, Exchange, Work, exchanges, key_exchanges
from polyformer.parallel.stages import check, num_layers, spans, stacks
from polyformer.parallel.tensor import check_divides
from polyformer.sequence.spread import Spreading

HOW = "stages", "pipeline_schedule"
"""What is said of a pipeline beside its processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained.

    batch: texts that a process reads at once, with those that share them (along context and tensor). length:
    tokens of a text. passes: batches of a step, which are a pipeline's microbatches. half: products in
    bfloat16 by autocast. optimizer: one of `STATES`.
    """

    mesh: ParallelConfig = ParallelConfig()
    batch: int = 1
    length: int = 512
    passes: int = 1
    half: bool = True
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for name in ("batch", "length", "passes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")
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
        """How many processes stand along each dimension; `data` is 1 unless it is said."""
        data = self.mesh.data or 1
        return {name: data if name == "data" else getattr(self.mesh, name) for name in DIMENSIONS}

    @property
    def world(self) -> int:
        """All processes."""
        return math.prod(self.sizes.values())

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all processes."""
        return self.batch * self.length * self.passes * self.sizes["data"] * self.sizes["shard"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one process; `recomputed`: activations where layers are computed again."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    recomputed: int

    def total(self, again: bool) -> int:
        """All of them, with the activations of the one or the other."""
        still = self.parameters + self.gradients + self.optimizer + self.gathered
        return still + (self.recomputed if again else self.activations)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The process that needs most: its place along the pipeline, from 0, its memory; and what is exchanged
    without and with recomputation, which sends more."""

    stage: int
    memory: Memory
    exchanges: list[Exchange]
    exchanges_again: list[Exchange]


def predict(config: ModelConfig, setting: Setting) -> Prediction:
    """Memory and traffic of a process that trains a model of `config`.

    Raises `InputError` where training on this mesh would, and for a model of which nobody can say what it
    keeps before it has computed.
    """
    sizes = setting.sizes
    whole = on_meta(config)
    check_mesh(whole, sizes)
    own = divided(config, sizes["tensor"])
    model = whole if own is config else on_meta(own)
    processes = sizes["pipeline"]
    stages = spans(num_layers(model), processes * setting.mesh.stages)
    size = 2 if setting.half else FLOAT
    work = Work(setting.batch, setting.length, setting.passes, len(stages), size, again=False)
    traced = kept(own, setting.batch, setting.length, setting.half, _spreading(own, sizes, work))
    candidates = []
    every = [stages[process::processes] for process in range(processes)]
    for process in {0, processes - 1}:
        part = held(model, process, every, sizes["shard"] * sizes["context"], setting.optimizer)
        inside = _activations(own, traced, process, every[process], len(traced.layers), setting)
        candidates.append((process, part, _memory(part, sizes, *inside)))
    stage, part, memory = max(candidates, key=lambda item: item[2].total(again=False))
    again = dataclasses.replace(work, again=True)
    return Prediction(
        stage, memory, exchanges(config, sizes, part, work), exchanges(config, sizes, part, again)
    )


def _spreading(own: ModelConfig, sizes: Mapping[str, int], work: Work) -> Spreading | None:
    """The process along `context` that gets most keys; None where there is one."""
    if sizes["context"] == 1:
        return None
    most = max(key_exchanges(own, sizes, work), key=lambda keys: keys.forward)
    return Spreading(None, most.process, sizes["context"])


def check_mesh(model: Transformer, sizes: Mapping[str, int]) -> None:
    """Raises the `InputError` of training on this mesh, where it cannot divide `model`."""
    if sizes["context"] > 1:
        for name in stacks(model):
            model._side(name).check_spreads()
    if sizes["tensor"] > 1:
        check_divides(model, sizes["tensor"])
    if sizes["pipeline"] > 1:
        check(model)


def _memory(part: Held, sizes: dict[str, int], activations: int, recomputed: int) -> Memory:
    whole = FLOAT * (part.rest + 2 * part.layer + part.layer) if sizes["shard"] * sizes["context"] > 1 else 0
    own = FLOAT * part.part
    return Memory(own, own, FLOAT * part.state, whole, activations, recomputed)


def _activations(
    config: ModelConfig, traced: Kept, process: int, own: list[range], layers: int, setting: Setting
) -> tuple[int, int]:
    """Bytes kept at once by a process along the pipeline whose stages have the layers `own` of all `layers`,
    with what stands before and behind them; and the same where only the layers' inputs are kept, and one
    layer at a time is whole."""
    tokens = setting.batch * -(-setting.length // setting.sizes["context"])
    costs, inputs = [], []
    for span in own:
        around = traced.before if span.start == 0 else 0
        around += traced.after + loss_bytes(config, tokens) if span.stop == layers else 0
        costs.append(around + sum(traced.layers[layer] for layer in span))
        inputs.append(around + sum(traced.inputs[layer] for layer in span))
    largest = max(traced.layers[layer] - traced.inputs[layer] for span in own for layer in span)
    way = process, setting.sizes["pipeline"], setting.passes, setting.mesh.pipeline_schedule
    return most_kept(costs, *way), most_kept(inputs, *way) + largest


def loss_bytes(config: ModelConfig, tokens: int) -> int:
    """What the chunked loss over the vocabulary keeps of `tokens` labelled tokens: the gradients of hidden
    states and of the output matrix, which it makes in the forward pass. Its logits are forgotten at once.

    0 for heads that predict few labels. A masked language model labels one token in seven; this counts all.
    """
    if config.head.kind not in ("language_model", "masked"):
        return 0
    shape = config.head_shape()
    return FLOAT * (shape.table_size or shape.hidden_size) * (tokens + shape.vocab_size)


def parse_mesh(text: str) -> ParallelConfig:
    """ "data=8,shard=8" as a configuration; raises `InputError` for other words."""
    values: dict[str, int | str] = {}
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in (*DIMENSIONS, *HOW):
            raise unknown("dimension of the mesh", name, (*DIMENSIONS, *HOW))
        if name in values or not (value.isdigit() or name == "pipeline_schedule"):
            raise InputError(f"mesh: expected {name}=N once, with a number of processes, got {quote(text)}")
        values[name] = int(value) if value.isdigit() else value
    return ParallelConfig.from_dict(values, "mesh")
