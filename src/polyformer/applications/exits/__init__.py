"""Closed-form fitting of early exits, and thresholds with a guaranteed risk by Learn then Test."""

from polyformer.applications.exits.calibrate import CalibrationResult, calibrate
from polyformer.applications.exits.config import CalibrateConfig
from polyformer.applications.exits.learn_then_test import bentkus, hoeffding_bentkus, lowest_valid

__all__ = [
    "CalibrateConfig",
    "CalibrationResult",
    "bentkus",
    "calibrate",
    "hoeffding_bentkus",
    "lowest_valid",
]
