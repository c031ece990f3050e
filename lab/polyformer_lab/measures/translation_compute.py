"""Operations of training an encoder-decoder until its validation loss reaches a level.

A step has six operations per weight and token (Kaplan et al. 2020, section 2.1): of the encoder per source
token, of the decoder and the output matrix per target token. The products of attention are left out, and so
are the projections of an absent self-attention.
"""

from itertools import count, islice, pairwise

from torch import nn

from polyformer.nn.stack.multihead import MultiHeadAttention
from polyformer.training.metrics import read_metrics
from polyformer.training.tasks import TaskWithData
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.scores import scores
from polyformer_lab.recurrent import NoAttention


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
