"""The device of a run, and all that affects its last bits: versions, processor, threads, processes."""

import os
import platform
from typing import Any

import numpy
import torch

from polyformer.core import __version__
from polyformer.core.errors import InputError
from polyformer.core.ops.tuning import processor

THREADS = "threads"
PROCESSOR = "device", "instructions", "onednn"


def choose_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda"; raise `InputError` if it is unavailable."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device: 'cuda' was requested, but torch finds no CUDA device; use 'auto' or 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that affect the results of a run."""
    return {
        "polyformer": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def machine(device: torch.device, processes: int) -> dict[str, Any]:
    """Return a description of the hardware: threads split sums, the instruction set selects kernels."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {
        "device": name,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"),
        THREADS: torch.get_num_threads(),
        "processes": processes,
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a text for each entry that differs between `before` and `now`.

    Versions of Python and numpy are ignored, because they do not change the results of torch.
    """
    names = [name for name in before if name in now and name not in ("python", "numpy")]
    return [f"{name} {before[name]}, now {now[name]}" for name in names if before[name] != now[name]]
