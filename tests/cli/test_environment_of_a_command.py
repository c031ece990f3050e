"""What a command sets for torch before it is loaded: threads without work sleep soon, so that they keep no
other process from a core; large tensors lie in huge pages."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from polyformer.cli.main import main
assert "torch" not in sys.modules, "too late"
main(sys.argv[1:])
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("THP_MEM_ALLOC_ENABLE"))
"""


@pytest.mark.parametrize(
    ("environment", "command", "expected"),
    [
        ({}, "list", ["1000", "1"]),
        ({"GOMP_SPINCOUNT": "7"}, "list", ["7", "1"]),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "list", ["None", "1"]),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, "bench", ["None", "0"]),
    ],
)
def test_what_the_user_sets_prevails(environment: dict[str, str], command: str, expected: list[str]):
    ours = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE"}
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    words = [sys.executable, "-c", CODE, command, "--help"]
    done = subprocess.run(words, env=clean | environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == expected
