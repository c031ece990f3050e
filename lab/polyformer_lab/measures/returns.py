"""The returns of policies during training."""

from collections.abc import Iterator

from polyformer.training.metrics import read_metrics
from polyformer.training.tasks import AgentConfig
from polyformer_lab.cells import Cell, Row, measurement


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
