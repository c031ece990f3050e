"""Closed-form fitting of early exits, and thresholds with a guaranteed risk by Learn then Test."""

from polyformer.calibration.calibrate import Calibrated, calibrate
from polyformer.calibration.config import CalibrateConfig
from polyformer.calibration.learn_then_test import bentkus, hoeffding_bentkus, lowest_valid

__all__ = [
    "CalibrateConfig",
    "Calibrated",
    "bentkus",
    "calibrate",
    "hoeffding_bentkus",
    "lowest_valid",
]
