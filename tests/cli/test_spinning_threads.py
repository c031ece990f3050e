"""Threads of a command sleep soon where they have no work, so that they keep no other process from a core."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from polyformer.cli import main
assert "torch" not in sys.modules, "too late"
main(sys.argv[1:])
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("environment", "command", "expected"),
    [
        ({}, "list", "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "list", "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "list", "None"),
        ({}, "bench", "None"),
    ],
)
def test_what_the_user_sets_prevails(environment: dict[str, str], command: str, expected: str):
    ours = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    words = [sys.executable, "-c", CODE, command, "--help"]
    done = subprocess.run(words, env=clean | environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == expected
