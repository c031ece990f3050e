"""The properties of a machine that the choices depend on: processor, instruction set, versions."""

import functools
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

CORE_CACHE = 1 << 20
"""Bytes of a core's private cache if the system does not report it."""

LAST_CACHE = 32 << 20
"""Bytes of the last-level cache if the system does not report it."""


@functools.cache
def processor() -> str:
    """Return name, family and model: virtual machines give different processors the same name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [facts[key] for key in ("cpu family", "model") if key in facts]
    return f"{name} ({'/'.join(numbers)})" if numbers else name


def instruction_set() -> str:
    """Return the widest vectors that torch may use ("AVX512", "AVX2"), and oneDNN's limit if one is set."""
    own = torch.backends.cpu.get_cpu_capability()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
    return f"{own}, oneDNN up to {limit}" if limit else own


@functools.cache
def core_cache() -> int:
    """Return the bytes of the second-level cache, which is private to a core on current processors."""
    return _size("SC_LEVEL2_CACHE_SIZE", CORE_CACHE)


@functools.cache
def last_cache() -> int:
    """Return the bytes of the last-level cache shared by one processor's cores."""
    return _size("SC_LEVEL3_CACHE_SIZE", LAST_CACHE)


def _size(name: str, default: int) -> int:
    """Return the value that the system reports, or `default`."""
    try:
        size = os.sysconf(name)
    except (AttributeError, ValueError, OSError):
        return default
    return size if size > 0 else default


def description() -> dict[str, str]:
    """Return all properties that identify the choices, except the number of threads."""
    return {
        "processor": processor(),
        "instruction set": instruction_set(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "polyformer": importlib.metadata.version("polyformer"),
    }
