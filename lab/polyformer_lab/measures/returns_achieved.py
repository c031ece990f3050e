"""Recorded episodes, and the returns that models of them achieve (Chen et al. 2021, section 5.2)."""

import importlib
import os
import shutil
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from polyformer.models.architectures import TrajectoryTransformer
from polyformer.training.rl.playing import Trial, achieved_returns
from polyformer.training.rl.recording import Recording, record
from polyformer.training.tasks.act import ActionPrediction
from polyformer_lab.cells import Cell, Row, measurement

DATA = "episodes-v0"
"""The data set in the folder of the cell that recorded it."""


@measurement()
def recorded_episodes(cell: Cell, environment: str, episodes: int, wrappers: Sequence[str] = ()) -> Row:
    """Record episodes of a scripted and of partly trained policies, so that returns cover the whole range.

    wrappers: of the environment, 'module:Class' each; their modules are imported.
    """
    for name in wrappers:
        importlib.import_module(name.partition(":")[0])
    shutil.rmtree(cell.folder / DATA, ignore_errors=True)  # an interrupted recording
    with unittest.mock.patch.dict(os.environ, MINARI_DATASETS_PATH=str(cell.folder)):
        record(
            Recording(
                environment=environment,
                out=DATA,
                policies=("scripted", "half-trained"),
                episodes=episodes,
                wrappers=tuple(wrappers),
                noise=1.0,
                seed=cell.seed or 0,
            )
        )
    return {"episodes": episodes}


@measurement("point")
def returns_achieved(cell: Cell, environment: str, episodes: int, points: int = 0) -> Iterator[Row]:
    """Yield the achieved return for each target return, and in the last row for the largest target.

    The environment has the wrappers of the recording.

    Args:
        cell: the seed after its seed is used for the trials.
        environment: its name.
        episodes: the number of episodes for each return.
        points: returns at equal distances between the 5th and the 95th percentile of the data; 0 for a model
            without return conditioning.
    """
    fitted = cell.fitted
    task, model = (
        cast(ActionPrediction, fitted.task),
        cast(TrajectoryTransformer, cast(Any, fitted.model).eval()),
    )
    asked = (0.0,)
    if points:
        low, high = np.percentile([sum(row["rewards"]) for row in cast(Any, fitted.splits.train)], [5, 95])
        asked = tuple(np.linspace(low, high, points).tolist())
    trial = Trial(
        environment=environment,
        wrappers=task.config.environment_wrappers,
        returns=asked,
        episodes=episodes,
        seed=(cell.seed or 0) + 1,
    )
    results = achieved_returns(model, task, trial)
    for point, (value, returns) in enumerate(sorted(results.items()) if points else ()):
        row = {"point": point, "asked": value}
        yield {**row, "achieved": float(np.mean(returns)), "deviation": float(np.std(returns))}
    yield (
        summary(results, task.config.mean_return or 0.0) if points else {"best": float(np.mean(results[0.0]))}
    )


def summary(results: Mapping[float, Sequence[float]], data_mean: float) -> Row:
    """Return the rank correlation of target and achieved returns, and the achieved return of the largest."""
    means = [float(np.mean(results[asked])) for asked in sorted(results)]
    ranks = np.argsort(np.argsort(means))
    correlation = float(np.corrcoef(np.arange(len(ranks)), ranks)[0, 1])
    return {
        "correlation": correlation,
        "largest": max(results),
        "best": means[-1],
        "data_mean": data_mean,
    }
