"""Training: one loop for all tasks, optimizers, schedules, and checkpoints that survive a killed process.

`tasks` connect data with a head, `objectives` are losses, `recipes` are complete trainings in YAML,
`distributed` divides one training over several processes, and `rl` has environments and policies.
"""

from typing import TYPE_CHECKING

from polyformer.core.imports import lazy_names

if TYPE_CHECKING:
    from polyformer.training.config import EngineConfig as EngineConfig
    from polyformer.training.config import ReportingConfig as ReportingConfig
    from polyformer.training.config import SavingConfig as SavingConfig
    from polyformer.training.config import TrainingConfig as TrainingConfig
    from polyformer.training.loop import Result as Result
    from polyformer.training.loop import train as train
    from polyformer.training.objectives import contrastive_loss as contrastive_loss
    from polyformer.training.optimizers import MuonConfig as MuonConfig
    from polyformer.training.optimizers import OptimizerConfig as OptimizerConfig
    from polyformer.training.optimizers import ScheduleConfig as ScheduleConfig
    from polyformer.training.recipes import *
    from polyformer.training.task import Batch as Batch
    from polyformer.training.task import TrainingTask as TrainingTask
    from polyformer.training.task import share as share
    from polyformer.training.task import share_rows as share_rows
    from polyformer.training.tasks import *

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Batch": "task",
        "EngineConfig": "config",
        "MuonConfig": "optimizers",
        "OptimizerConfig": "optimizers",
        "ReportingConfig": "config",
        "Result": "loop",
        "SavingConfig": "config",
        "ScheduleConfig": "optimizers",
        "TrainingConfig": "config",
        "TrainingTask": "task",
        "contrastive_loss": "objectives",
        "share": "task",
        "share_rows": "task",
        "train": "loop",
    },
    ["recipes", "tasks"],
)
