"""The loss around a trained model, along filter-normalized directions (Li et al. 2018, sections 4 and 6).

    L(a) = loss(w + a d)        d_f <- d_f |w_f| / |d_f| for each row f of each matrix

d is normal noise. Vectors (biases and norms) are not moved, as in the paper.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn

from polyformer_lab.cells import Cell, Row, measurement

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
    held = task.held_out(cell.fitted.splits.validation or [])
    read = [batch for _, batch in islice(held.batches.epoch(0), batches)]

    def mean_loss() -> float:
        nats, tokens = torch.stack([task.totals(model, batch) for batch in read]).sum(0)
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
