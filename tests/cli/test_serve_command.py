"""`polyformer serve` before it serves: addresses and models that it refuses, and what it leaves alone."""

import io
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from absl import logging as absl_logging

from chat_models import chat_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("served"))


def test_addresses_and_models_that_cannot_be_served(
    folder: Path, tmp_path: Path, complaint: Callable[..., str]
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "--host, --port" in complaint("serve", folder, "--port", taken.getsockname()[1])
    assert "no such directory" in complaint("serve", tmp_path / "none")


def test_handlers_of_other_libraries_stay_open(folder: Path, complaint: Callable[..., str]):
    """absl's handler closes its stream, which is standard error, when it is closed."""
    stream = io.StringIO()
    handler = absl_logging.PythonHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            complaint("serve", folder, "--port", taken.getsockname()[1])
        assert not stream.closed
    finally:
        logging.getLogger().removeHandler(handler)
