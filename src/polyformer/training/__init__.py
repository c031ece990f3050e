"""Training: one loop for every task, optimizers, schedules, and checkpoints that survive a killed process."""

from polyformer.training.config import EngineConfig, ReportingConfig, SavingConfig, TrainingConfig
from polyformer.training.loop import Result, train
from polyformer.training.muon import MuonConfig
from polyformer.training.optimizers import OptimizerConfig
from polyformer.training.schedules import ScheduleConfig
from polyformer.training.task import Batch, Task, share, share_rows

__all__ = [
    "Batch",
    "EngineConfig",
    "MuonConfig",
    "OptimizerConfig",
    "ReportingConfig",
    "Result",
    "SavingConfig",
    "ScheduleConfig",
    "Task",
    "TrainingConfig",
    "share",
    "share_rows",
    "train",
]
