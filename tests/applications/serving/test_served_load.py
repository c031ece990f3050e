"""Many clients at once, and hostile ones among them: a short run of the program `tests/served_load.py`."""

from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from test_server import served

from chat_models import chat_folder
from registered import EVERYTHING
from served_load import Server, hostile_bodies, measure

CLIENTS, SECONDS = (32, 60.0) if EVERYTHING else (6, 3.0)


def test_a_server_under_load_refuses_the_hostile_and_nothing_else(tmp_path: Path):
    words = "--max-tokens", 600, "--max-batch", CLIENTS, "--max-queue", 4 * CLIENTS
    with served(chat_folder(tmp_path), *words, key=None) as (program, address):
        pid = program.process.pid
        assert pid is not None
        figures = measure(Server(address, pid, "tiny"), CLIENTS, SECONDS)
    assert figures["failures"] == []
    assert figures["texts equal to those computed alone"] == figures["ordinary requests"] > CLIENTS
    assert figures["hostile requests, refused with 4xx"] > (len(hostile_bodies("")) if EVERYTHING else 4)
    assert figures["streams that were left"] > 1
