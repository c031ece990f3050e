"""Compute: operations, and the time of a training step or of reading a token.

Operations of pre-training encoders are counted as in Clark et al. 2020 (appendix G): the products of matrices
and of attention, three times for a step with forward and backward, and no elementwise operations.

An encoder-decoder is trained until its validation loss reaches a level. A step has six operations per weight
and token (Kaplan et al. 2020, section 2.1): of the encoder per source token, of the decoder and the output
matrix per target token. The products of attention are left out, and so are the projections of an absent
self-attention.

Times are relative to another run's, measured in turn. Sliding evaluation and reading with a memory are
compared as in Dai et al. 2019, table 9.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import polyformer_lab.layers  # noqa: F401  (registers the recurrent parts of the models)
from polyformer.core.host_values import IGNORED
from polyformer.core.measuring import median, time_interleaved
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import DetectConfig, MaskedConfig
from polyformer.nn.stack.multihead import MultiHeadAttention
from polyformer.training.metrics import read_metrics
from polyformer.training.recipes import Run
from polyformer.training.tasks import TaskWithData
from polyformer.training.tasks.masked import ElectraConfig, MaskedDocumentsConfig, generator_config
from polyformer_lab.cells import Cell, Row, measurement, resumed
from polyformer_lab.layers import NoAttention
from polyformer_lab.measures.generated import Options, created
from polyformer_lab.measures.scores import scores


def operations(task: MaskedDocumentsConfig, model: ModelConfig) -> float:
    """Return the operations of training per token: of masked modelling, or of ELECTRA's two models."""
    length, share = task.row_length, task.masking.share
    if not isinstance(task, ElectraConfig):
        return 3 * (
            _body(dataclasses.replace(model, head=MaskedConfig()), length) + 2 * share * _decoder(model)
        )
    generator = generator_config(model, task.generator_size)
    detection = 2 * (model.hidden_size + 1) * model.hidden_size
    model_alone = 3 * (_body(dataclasses.replace(model, head=DetectConfig()), length) + detection)
    drawing = 2 * share * _decoder(generator)  # once more than in training, without a gradient
    return model_alone + 3 * (_body(generator, length) + 2 * share * _decoder(generator)) + drawing


def _body(config: ModelConfig, length: int) -> float:
    """Return the operations per token of one pass through the layers and the projection of the embedding."""
    with torch.device("meta"):
        model = Transformer(config)
    assert config.encoder is not None
    parts = [part for part in (model.encoder, model.encoder_embedding) if part is not None]
    linear = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
    matrices = sum(module.weight.numel() for module in linear)
    return 2 * (matrices + 2 * length * config.hidden_size * config.encoder.num_hidden_layers)


def _decoder(config: ModelConfig) -> int:
    """Return the number of weights between a hidden state and its logits over the vocabulary."""
    width = config.embedding.width(config.hidden_size)
    return config.hidden_size * width + width * config.vocab_size


@measurement()
def faster_than(cell: Cell, run: str, rows: int, length: int, repeats: int) -> Row:
    """Return the scores of the cell's masked model, and how many times as fast as another model it trains.

    Args:
        cell: a run.
        run: the folder of a finished run with the other model.
        rows: the rows of a batch.
        length: the tokens of a row.
        repeats: the timed passes of each model, forward and backward.
    """
    other = resumed(Run.open(Path(run)).recipe, Path(run)).model
    steps = {"own": step(cell.fitted.model, rows, length), "other": step(other, rows, length)}
    timed = time_interleaved(steps, repeats)
    return {**scores(cell), "speedup": median(timed["other"]) / median(timed["own"])}


def step(model: nn.Module, rows: int, length: int, masked: float = 0.15) -> Callable[[], object]:
    """Return a forward and backward pass over a batch that is equal for all models.

    masked: the share of tokens with a label.
    """
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(200, (rows, length), generator=draw)
    labels = ids.masked_fill(torch.rand(rows, length, generator=draw) >= masked, IGNORED)
    model.train()

    def run() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()

    return run


@measurement("model", "length")
def training_steps(
    cell: Cell, models: Mapping[str, Options], tokens: int, lengths: Sequence[int], repeats: int
) -> Iterator[Row]:
    """Yield for each model and length the least milliseconds of forward and backward.

    Args:
        cell: the cell; nothing is trained.
        models: by name a preset of decoders and its options; parts of `polyformer_lab.layers` are known.
        tokens: tokens of a step.
        lengths: tokens of a row.
        repeats: the timed steps of each.
    """
    steps = {}
    for name, own in models.items():
        model = created(own).train()
        for length in lengths:
            ids = torch.randint(0, model.config.vocab_size, (tokens // length, length))
            steps[name, length] = functools.partial(_step, model, ids)
    for (name, length), seconds in time_interleaved(steps, repeats).items():
        yield {"model": name, "length": length, "milliseconds": 1e3 * min(seconds)}


def _step(model: Transformer, ids: Tensor) -> None:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()


@measurement()
def translation_compute(cell: Cell, level: float) -> Row:
    """Return the scores of a run, its weights, and its operations until the validation loss is `level`.

    operations: of the whole run. until: up to the level, on a straight line between evaluations; the whole
    run where the level is not reached.
    """
    fitted = cell.fitted
    steps = fitted.result.step
    task = TaskWithData(fitted.task, fitted.splits, fitted.run.recipe.seed)
    batches = (batch for epoch in count() for batch in task.batches(epoch, 0, 0, 1))
    source = target = 0
    for batch in islice(batches, steps):
        source += batch["input_ids"].numel()
        target += batch["labels"].numel()
    model = fitted.model
    encoder, decoder = (weights(stack) for stack in (model.encoder, model.decoder))
    output = model.config.vocab_size * model.config.hidden_size
    operations = 6.0 * (encoder * source + (decoder + output) * target)
    losses = [(row["step"], loss) for row in read_metrics(cell.folder) if (loss := row.get("valid_loss"))]
    share = step_of_level([(float(step or 0), loss) for step, loss in losses], level, steps) / steps
    return {
        **scores(cell),
        "weights": encoder + decoder,
        "operations": operations,
        "until": share * operations,
    }


def weights(stack: nn.Module | None) -> int:
    """Return the number of weights of matrices, without the projections of an absent self-attention."""
    if stack is None:
        return 0
    absent = {
        weight
        for module in stack.modules()
        if isinstance(module, MultiHeadAttention) and isinstance(module.mechanism, NoAttention)
        for weight in module.parameters()
    }
    return sum(x.numel() for x in stack.parameters() if x.dim() >= 2 and x not in absent)


def step_of_level(losses: list[tuple[float, float]], level: float, steps: int) -> float:
    """Return the step at which the loss reaches `level`, between its values (step, loss); else `steps`."""
    for (before, high), (step, low) in pairwise(losses):
        if low <= level < high:
            return before + (step - before) * (high - level) / (high - low)
    return float(steps)


@measurement("length")
@torch.no_grad()
def sliding_cost(cell: Cell, lengths: Sequence[int], model: Options, repeats: int) -> Iterator[Row]:
    """Yield for each length of attention the milliseconds per token of both, and their factor.

    Args:
        cell: the cell; nothing is trained.
        lengths: tokens of the window, and of a segment and its memory.
        model: a preset of decoders and its options; the memory has positions of Transformer-XL.
        repeats: the timed passes of each.
    """
    for length in lengths:
        window = created(model).eval()
        memory = {"memory": f"recurrent(length={length})", "position": "transformer_xl"}
        reader = created(model, **memory).eval()
        timed = time_interleaved(_passes(window, reader, length), repeats)
        slid, read = median(timed["window"]), median(timed["memory"]) / length
        yield {"length": length, "sliding_ms": 1e3 * slid, "memory_ms": 1e3 * read, "factor": slid / read}


def _passes(window: Transformer, reader: Transformer, length: int) -> dict[str, Callable[[], object]]:
    """Return a pass over `length` tokens without a memory, and a pass with a full memory."""
    ids = torch.zeros(1, length, dtype=torch.long)
    state = reader(ids, use_cache=True).state
    return {"window": lambda: window(ids), "memory": lambda: reader(ids, state=state, use_cache=True)}
