"""The forward and backward passes of one step, by the whole model or by the stages of a pipeline."""

from typing import TYPE_CHECKING

import torch

from polyformer.training.engine import Engine
from polyformer.training.feed import StepBatches
from polyformer.training.recurrent_loss import RecurrentLoss

if TYPE_CHECKING:
    from polyformer.training.distributed.pipeline import Pipeline


def run_passes(engine: Engine, recurrent_loss: RecurrentLoss, group: StepBatches) -> torch.Tensor:
    """Compute the gradients of the mean loss over the labelled tokens of the step.

    Returns the sum of the losses of this process's tokens, a float64 scalar on the device.
    """
    if engine.pipeline is not None:
        return _run_pipeline(engine, engine.pipeline, group)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for i, (batch, weight) in enumerate(zip(group.batches, group.weights)):
        with engine.no_sync_unless_last(skip=i + 1 < len(group.batches)):
            with engine.autocast(), engine.context_parallel():
                loss = recurrent_loss.loss(engine.wrapped, engine.place(batch))
            # Data parallelism averages gradients over the ranks; the factor `data_world` makes it a sum.
            engine.scaler.scale(loss * (weight * engine.data_world / group.total)).backward()
        total += loss.detach().double() * weight
    return total


def _run_pipeline(engine: Engine, pipeline: "Pipeline", group: StepBatches) -> torch.Tensor:
    """Run the batches of the step as microbatches of the pipeline."""
    assert engine.mesh is not None
    # Gradients are averaged over the shards of a replica, and summed over replicas.
    shares = [float(weight * engine.mesh.size("shard") / group.total) for weight in group.weights]
    losses = pipeline.step([engine.place(batch) for batch in group.batches], shares)
    if engine.mesh.size("data") > 1:
        pipeline.sum_over_replicas(engine.mesh.group("data"))
    total = sum(loss * weight for loss, weight in zip(losses, group.weights))
    return torch.tensor(total, dtype=torch.float64, device=engine.device)
