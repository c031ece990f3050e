"""Runs a command while every core is kept busy, for faults that show only on a contended machine.

python tests/under_load.py COMMAND [ARGUMENT ...]
"""

import multiprocessing
import os
import subprocess
import sys


def spin() -> None:
    """Keep a core busy until this process is terminated."""
    while True:
        pass


def main(command: list[str]) -> int:
    """The exit status of `command`."""
    spinners = [multiprocessing.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for spinner in spinners:
        spinner.start()
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for spinner in spinners:
            spinner.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
