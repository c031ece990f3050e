"""Shared by all tests: where real data lies, if this machine has it."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The suite runs a process for each core: threads of their own would only wait for one another.
torch.set_num_threads(1)

# For devices that are not there torch.manual_seed keeps a stack trace a call: more work than many a test.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tens of thousands of collected tests stay to the end: no later collection of garbage looks at them, 7 %
    of the suite's time."""
    gc.collect()
    gc.freeze()


settings.register_profile("fuzz", max_examples=2000)  # of `make fuzz`: see tests/fuzz


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """`shared_data("multi30k")`: the folder of a real data set; skips the test where there is none.

    Looked for in `$POLYFORMER_DATA`, else in `shared/data` beside the checkout.
    """
    root = Path(os.environ.get("POLYFORMER_DATA", Path(__file__).parents[2] / "shared" / "data"))

    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            pytest.skip(f"no data set {name!r} under {root}")
        return root / name

    return folder


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`complaint(*words)`: the one line that a command says that ends with an error."""

    def run(*words: object) -> str:
        from polyformer.cli import main

        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("polyformer: error: ")
        assert error.count("\n") == 1
        return error

    return run
