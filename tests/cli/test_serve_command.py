"""`polyformer serve` before it serves: addresses and models that it refuses, and what it leaves alone."""

import io
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from absl import logging as absl_logging

import polyformer
from chat_models import TINY, chat_folder, chat_tokenizer
from polyformer.attention.patterns import Pattern
from polyformer.cli.commands.serve import ServeOptions, open_server
from polyformer.models.presets import create_model


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


def engine_of(folder: Path, **options: Any) -> Any:
    return open_server(ServeOptions(model=str(folder), device="cpu", **options), None).engine


def test_options_of_the_state_reach_the_engine_or_are_refused(
    folder: Path, tmp_path: Path, complaint: Callable[..., str]
):
    """Texts with each option are compared with `generate` in test_serving_engine."""
    engine = engine_of(folder, attention="Window(9)", memory="sinks(first=2, length=20)")
    stack = engine.model.config.decoder
    assert stack.attention.mechanism.pattern == Pattern.parse("Window(9)")
    assert stack.memory.length == 20
    assert engine_of(folder, cache="int8").joins
    assert "got the mechanism 'linformer(k=8)'" in complaint("serve", folder, "--attention", "linformer(k=8)")
    assert "unknown kind of --cache 'nonsense'" in complaint("serve", folder, "--cache", "nonsense")
    assert "memory" in complaint("serve", folder, "--memory", "nonsense")
    tokenizer = chat_tokenizer(None)
    create_model("bert-base", vocab_size=len(tokenizer), **TINY).save_pretrained(tmp_path, format="hub")
    tokenizer.save(tmp_path)
    for name in ("attention", "memory", "cache"):
        assert f"--{name}: not available" in complaint("serve", tmp_path, f"--{name}", "int8")


def test_other_kinds_of_weights_are_served(folder: Path, tmp_path: Path):
    """Weights of 8 bits, with a memory that shares them."""
    polyformer.from_pretrained(folder, weights="int8").save_pretrained(tmp_path)
    chat_tokenizer().save(tmp_path)
    assert engine_of(tmp_path, memory="sinks(length=20)").model.config.weights == "int8"
