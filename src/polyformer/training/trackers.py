"""Trackers of experiments: metrics of a run in TensorBoard, Weights & Biases, MLflow and trackio.

accelerate's trackers write to these services; here is what each needs to begin and to go on. A run that is
resumed continues the same run of the service; its name is in OUT/tracking.json. metrics.jsonl remains the
record of the run: a service that fails ends no training, it is left out with a warning.

    tensorboard    events in OUT/tensorboard; steps that run again replace the earlier ones
    wandb          files in OUT/wandb; the project is WANDB_PROJECT, or the folder that holds OUT
    mlflow         the server or folder that MLFLOW_TRACKING_URI names; the experiment is that folder's name
    trackio        its own folder of the user; the project is that folder's name
"""

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from polyformer.core.errors import InputError, caution
from polyformer.core.files import atomic_write, read_json

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Names of `tracking`."""

NAMES = "tracking.json"
"""The file in a run's folder with the names of its runs in the services."""


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise `InputError` for a tracker that is named twice or not installed."""
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"tracking: {name} is named twice")
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"tracking: {name} is not installed; pip install {name}, or leave it out: metrics.csv and "
                "metrics.jsonl are written anyway"
            )


class Trackers:
    """The trackers of one run, on its main process.

    out: the folder of the run. after: the step after which it continues, 0 for a new run. settings: of the
    run, by dotted name.
    """

    def __init__(
        self, out: Path, names: Sequence[TrackerName], after: int = 0, settings: dict[str, Any] | None = None
    ):
        self.out, self.after = out, after
        known = read_json(out / NAMES, dict) if after and (out / NAMES).exists() else {}
        self.known: dict[str, str] = {name: str(value) for name, value in known.items()}
        self.active: dict[str, Any] = {}
        for name in names:
            self._attempt(name, lambda name=name: self._start(name, settings or {}))
        if self.known:
            atomic_write(out / NAMES, json.dumps(self.known, indent=1).encode())

    def log(self, values: dict[str, float], step: int) -> None:
        """Add the metrics of a step."""
        for name, tracker in list(self.active.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(values, step=step))

    def close(self) -> None:
        """End the runs of all services."""
        for name, tracker in list(self.active.items()):
            self._attempt(name, tracker.finish)
        self.active = {}

    def _attempt(self, name: str, work: Callable[[], object]) -> None:
        """Do the work of a tracker; leave the tracker out if it fails: training continues without it."""
        try:
            work()
        except Exception as error:
            self.active.pop(name, None)
            caution(f"tracking: {name} is left out from here, as it failed: {type(error).__name__}: {error}")

    def _start(self, name: str, settings: dict[str, Any]) -> None:
        tracker = STARTS[name](self)
        tracker.main_process_only = False  # this is the main process
        tracker.start()
        self.active[name] = tracker
        if name == "wandb":
            self.known[name] = tracker.tracker.id
        elif name == "mlflow":
            self.known[name] = tracker.tracker.info.run_id
        # For TensorBoard accelerate would write to a second folder. A resume in trackio replaces settings.
        if name == "trackio" or (not self.after and name != "tensorboard"):
            tracker.store_init_configuration(settings)

    @property
    def project(self) -> str:
        """The name of the runs' common project: of the folder that holds the run."""
        return self.out.absolute().parent.name or "polyformer"


def _tensorboard(run: Trackers) -> Any:
    from accelerate.tracking import TensorBoardTracker

    return TensorBoardTracker("tensorboard", run.out, purge_step=run.after + 1)


def _wandb(run: Trackers) -> Any:
    from accelerate.tracking import WandBTracker

    project = os.environ.get("WANDB_PROJECT", run.project)
    goes_on = {"id": run.known["wandb"], "resume": "allow"} if "wandb" in run.known else {}
    return WandBTracker(project, dir=str(run.out), name=run.out.name, **goes_on)


def _mlflow(run: Trackers) -> Any:
    from accelerate.tracking import MLflowTracker

    return MLflowTracker(run.project, run_id=run.known.get("mlflow"), run_name=run.out.name)


def _trackio(run: Trackers) -> Any:
    from accelerate.tracking import TrackioTracker

    return TrackioTracker(run.project, name=run.out.name, resume="allow")


STARTS: dict[str, Callable[[Trackers], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
"""Functions that make accelerate's tracker of a run."""
