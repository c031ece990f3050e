"""One checkpoint and one store for all tests of a worker."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_stores import TEXT, built, tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some thousands of bytes."""
    file = tmp_path_factory.mktemp("text") / "bottles.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="session")
def store(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text's store, not to be changed."""
    return built(checkpoint, text, tmp_path_factory.mktemp("store") / "store")


@pytest.fixture
def server_uri() -> str:
    """Of a Milvus server on a port that nobody has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def server(tmp_path: Path, server_uri: str) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    """Starts a server process there, each time with the same data."""
    port = server_uri.rpartition(":")[2]
    started: list[subprocess.Popen[bytes]] = []

    def start() -> "subprocess.Popen[bytes]":
        words = ["-m", "milvus_lite", "server", "--data-dir", str(tmp_path / "data"), "--port", port]
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        started.append(process)
        for _ in range(300):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", int(port))) == 0:
                    return process
            time.sleep(0.1)
        raise AssertionError("the server does not listen")

    yield start
    for process in started:
        process.kill()
        process.wait()
