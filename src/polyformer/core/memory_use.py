"""The memory use of this process, as counted by the operating system."""

import sys
from pathlib import Path

MIB = 1 << 20


def reset_peak_memory() -> int:
    """Return the resident bytes; on Linux this also resets the high-water mark."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """Return the largest number of bytes that were resident at the same time."""
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status")
    if status.exists():  # VmHWM is the mark that clear_refs resets
        most = next(
            int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )
    return most * (1 if sys.platform == "darwin" else 1024)
