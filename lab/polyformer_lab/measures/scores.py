"""Measurements of finished runs. The default is the scores of the runs; others change or look into them.

Scores of an ensemble are those of the mean of the probabilities of several language models. Trained models
are converted to another attention, or their matrices rounded. Encoders are compared by their masked loss on
equal rows, however they were pre-trained.

The loss around a trained model is along filter-normalized directions (Li et al. 2018, sections 4 and 6):

    L(a) = loss(w + a d)        d_f <- d_f |w_f| / |d_f| for each row f of each matrix

d is normal noise. Vectors (biases and norms) are not moved, as in the paper.
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.mechanisms.spans import spans
from polyformer.attention.patterns import Pattern
from polyformer.attention.patterns.implied import Causal
from polyformer.attention.patterns.layout import count
from polyformer.core.host_values import IGNORED, next_labels
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import convert, read_attention
from polyformer.nn.feedforward.feedforward import Dense
from polyformer.training.metrics import read_metrics
from polyformer.training.recipes import Run
from polyformer.training.recipes.fit import Fitted
from polyformer.training.recipes.report import write_sheet
from polyformer.training.tasks import AgentConfig, HeldOut, ImageModelling, MaskedModellingConfig, TextTask
from polyformer_lab.cells import Cell, Row, measurement, resumed
from polyformer_lab.costs import costs


@measurement()
def scores(cell: Cell) -> Row:
    """Return the scores by split ("validation.loss"), sizes, the last training loss, speed and costs."""
    return {**scores_and_sizes(cell.fitted, cell.folder), **costs(cell.fitted)}


def scores_and_sizes(fitted: Fitted, folder: Path) -> Row:
    """Return the scores by split, the sizes of the model, and what the log of a run in `folder` says."""
    sizes = {name: x.numel() for name, x in fitted.model.named_parameters()}
    row: Row = {
        f"{split}.{name}": value for split, own in fitted.scores.items() for name, value in own.items()
    }
    losses = [loss for each in read_metrics(folder) if (loss := each.get("loss")) is not None]
    return {
        **row,
        "training.loss": statistics.fmean(losses[-5:]) if losses else None,
        "parameters": sum(sizes.values()),
        "layer_parameters": sum(size for name, size in sizes.items() if "layers" in name),
        "seconds": step_seconds(folder),
    }


def step_seconds(folder: Path) -> float | None:
    """Return the seconds of a training step, the median over the log of the run."""
    rows = [{"step": 0.0, "seconds": 0.0}, *read_metrics(folder)]
    marks = [(float(row["step"] or 0), float(s)) for row in rows if (s := row.get("seconds")) is not None]
    steps = [(t - s) / (j - i) for (i, s), (j, t) in pairwise(marks) if j > i]
    return statistics.median(steps) if steps else None


class Ensemble(nn.Module):
    """Several decoders as one, for a loss over held-out rows."""

    def __init__(self, models: Sequence[nn.Module]):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, labels: Tensor, **batch: Any) -> SimpleNamespace:
        """Return the mean loss over the next tokens of `labels` [B, T]."""
        targets = next_labels(labels, batch.get("document_ids"))
        log_p = torch.stack([model(**batch).logits.log_softmax(-1) for model in self.models])
        mixed = torch.logsumexp(log_p, 0) - torch.tensor(float(len(self.models))).log()
        nll = -mixed.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return SimpleNamespace(loss=nll[targets != IGNORED].mean())


@measurement()
def ensemble(cell: Cell, runs: Sequence[str]) -> Row:
    """Return the validation scores of the mean of the probabilities of finished runs of one task."""
    fitted = [resumed(Run.open(Path(folder)).recipe, Path(folder)) for folder in runs]
    task, held = fitted[0].task, fitted[0].splits.validation
    assert held is not None
    scores = task.metrics.measure(Ensemble([own.model for own in fitted]).eval(), task.rows.held_out(held))
    return {f"validation.{name}": value for name, value in scores.items()}


@measurement("converted")
def converted(cell: Cell, attentions: Mapping[str, str | None] = {}) -> Iterator[Row]:
    """Yield the validation perplexity of the run, or of its model converted to each attention.

    Args:
        cell: a run.
        attentions: the attention of each conversion by name, None for no change; each model is saved in
            the folder of this name in the run's folder.
    """
    fitted = cell.fitted
    assert isinstance(fitted.task, TextTask)
    rows = fitted.task.rows.held_out(fitted.splits.validation or [])
    for name, text in attentions.items():
        model, report = convert(fitted.model, read_attention(text))
        model.save_pretrained(cell.folder / name)
        scores = fitted.task.metrics.measure(model.eval(), rows)
        yield {
            "converted": name,
            "perplexity": scores["perplexity"],
            "new_tensors": len(report.newly_initialized),
        }
    if not attentions:
        yield {"perplexity": fitted.scores["validation"]["perplexity"]}


@measurement("weights")
def after_rounding(cell: Cell, bits: Sequence[int] = ()) -> Iterator[Row]:
    """Yield the validation loss as trained, and after the feed-forward matrices are rounded to `bits`."""
    from polyformer_lab.layers import with_rounding  # registers a member, for these studies only

    fitted = cell.fitted
    rows = fitted.task.rows.held_out(fitted.splits.validation or [])
    yield {"weights": "as trained", "loss": fitted.scores["validation"]["loss"]}
    for number in bits:
        model = copy.deepcopy(fitted.model).eval()
        for layer in [module for module in model.modules() if isinstance(module, Dense)]:
            with_rounding(layer, number)
        yield {"weights": f"{number} bits", "loss": fitted.task.metrics.measure(model, rows)["loss"]}


@measurement()
def masked_rows(cell: Cell, row_length: int) -> Row:
    """Return the loss on masked tokens of the validation text in packed rows, and the scores of the run.

    The rows and masks are equal for all cells of a seed with the same tokenizer, in nats per masked token.
    Rows have no token types.

    Args:
        cell: a pre-training with masked tokens, also with pairs of sentences.
        row_length: the number of tokens of a row.
    """
    fitted = cell.fitted
    assert isinstance(fitted.task, TextTask)
    task = MaskedModellingConfig(row_length=row_length, batch_tokens=4096).build(fitted.task.tokenizer)
    rows = task.rows.held_out(fitted.splits.validation or [])
    return {"masked.loss": masked_loss(fitted.model.eval(), rows), **scores(cell)}


@torch.no_grad()
def masked_loss(model: Transformer, rows: HeldOut) -> float:
    """Return the mean nats per masked token."""
    nats, count = 0.0, 0
    for _, batch in rows.batches.epoch(0):
        labels = batch.pop("labels")
        masked = labels >= 0
        hidden = model(**batch).last_hidden_state[masked]
        logits = model.predictions(hidden.unsqueeze(0)).squeeze(0)
        nats += float(F.cross_entropy(logits, labels[masked], reduction="sum"))
        count += len(hidden)
    return nats / count


@measurement()
def images(cell: Cell, pixels: int) -> Row:
    """Return the scores and the mean number of keys of a pixel; draw completed images into the cell's folder.

    Args:
        cell: a decoder of images with a `pattern` in its recipe.
        pixels: the number of pixels of an image.
    """
    assert cell.recipe is not None
    fitted = cell.fitted
    assert isinstance(fitted.task, ImageModelling)
    write_sheet(cell.folder / "images.png", fitted.task, fitted.model, fitted.splits, cell.seed or 0)
    return {**scores(cell), "keys": keys(Pattern.from_text(cell.recipe["model"]["pattern"]), pixels)}


def keys(pattern: Pattern, pixels: int) -> float:
    """Return how many keys a pixel has in a decoder, on average."""
    context, limited = Context(pixels, pixels, causal=True), pattern & Causal()
    return sum(count(limited.keys(context, i, i + 1).some) for i in range(pixels)) / pixels


@measurement("steps")
def returns(cell: Cell) -> Iterator[Row]:
    """Yield the mean return of each evaluation by steps in the environment.

    The last row has the last return and the size of the policy.
    """
    fitted = cell.fitted
    task = fitted.run.recipe.task
    assert isinstance(task, AgentConfig)
    own: Row = {}
    for row in read_metrics(cell.folder):
        if (value := row.get("valid_return")) is not None:
            steps = int(row["step"] or 0) * task.rows * task.steps // (task.passes * task.minibatches)
            own = {"mean_return": value}
            yield {"steps": steps, **own}
    parameters = sum(parameter.numel() for parameter in fitted.model.parameters())
    yield {"last_return": own.get("mean_return"), "parameters": parameters}


@measurement("layer")
def learned_spans(cell: Cell) -> Iterator[Row]:
    """Yield the mean and the longest span of each layer, in tokens."""
    for number, own in enumerate(spans(cell.fitted.model).values(), 1):
        yield {"layer": number, "span": statistics.fmean(own), "longest": max(own)}


Direction = dict[str, Tensor]


@measurement("step")
def loss_surface(cell: Cell, directions: int, reach: float, points: int, batches: int) -> Iterator[Row]:
    """Yield the loss at each step along the directions, the mean over them.

    The row of step 0 also has `rise`, the mean rise of the loss at the ends of the directions, and
    `concave`, the share of inner points of all directions at which the second difference of the loss is
    negative.

    Args:
        cell: a run.
        directions: the number of random directions.
        reach: the longest step: 1 adds noise of the norm of the weights.
        points: steps on each side of the trained model.
        batches: validation batches for the loss.
    """
    model, task = cell.fitted.model.eval(), cell.fitted.task
    held = task.rows.held_out(cell.fitted.splits.validation or [])
    read = [batch for _, batch in islice(held.batches.epoch(0), batches)]

    def mean_loss() -> float:
        nats, tokens = torch.stack([task.metrics.totals(model, batch) for batch in read]).sum(0)
        return float(nats / tokens)

    generator = torch.Generator().manual_seed(cell.seed or 0)
    steps = [reach * number / points for number in range(-points, points + 1)]
    losses = torch.empty(directions, len(steps), dtype=torch.float64)
    for line in losses:
        direction = drawn_direction(model, generator)
        for index, step in enumerate(steps):
            line[index] = moved_loss(model, direction, step, mean_loss)
    bends = losses[:, 2:] - 2 * losses[:, 1:-1] + losses[:, :-2]
    ends = (losses[:, 0] + losses[:, -1]) / 2 - losses[:, points]
    for step, loss in zip(steps, losses.mean(0).tolist()):
        row: Row = {"step": round(step, 6), "loss": loss}
        if step == 0:
            row |= {"concave": float((bends < 0).double().mean()), "rise": float(ends.mean())}
        yield row


@torch.no_grad()
def drawn_direction(model: nn.Module, generator: torch.Generator) -> Direction:
    """Return normal noise with the row norms of the matrices of `model`, by the names of the parameters."""
    direction = {}
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            norms = [x.flatten(1).norm(dim=1).clamp_min(1e-12) for x in (weight, noise)]
            direction[name] = noise * (norms[0] / norms[1]).view(-1, *[1] * (weight.dim() - 1))
    return direction


@torch.no_grad()
def moved_loss(model: nn.Module, direction: Direction, step: float, loss: Callable[[], float]) -> float:
    """Return the loss of `model` at `step` along the direction; the weights are put back afterwards."""
    parameters = dict(model.named_parameters())
    kept = {name: parameters[name].clone() for name in direction}
    try:
        for name, noise in direction.items():
            parameters[name].add_(noise, alpha=step)
        return loss()
    finally:
        for name, weight in kept.items():
            parameters[name].copy_(weight)
