"""Drafts of a server: a text alone in the batch has the same tokens by fewer passes of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from test_server import client_of, served
from test_serving_engine import TOKENIZER, Client, alone, model_of, prompt

from chat_models import chat_folder
from polyformer import GenerationConfig, create_model
from polyformer.applications.serving.drafting import Drafting, DraftingEngine
from polyformer.applications.serving.engine import Limits
from polyformer.applications.serving.rows import Ended, Piece
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.models.generation.config import SpeculationConfig
from polyformer.nn.cache import CachePolicy

INT8: Any = CachePolicy.from_dict("int8")
PERIOD = prompt(7) * 4
"""A prompt that repeats itself, as a look-up proposes tokens from the first step on."""


@contextmanager
def drafting(
    model: Any, draft: Any = "lookup", cache: CachePolicy | None = None, **numbers: Any
) -> Iterator[DraftingEngine]:
    how = Drafting(draft=draft, speculation=SpeculationConfig(**numbers))
    with DraftingEngine(model, TOKENIZER, Limits(tokens=600), cache, drafting=how) as engine:
        yield engine


@pytest.mark.parametrize("name", ["rotary", "learned", "alibi"])
@pytest.mark.parametrize("cache", [None, INT8], ids=["plain", "int8"])
def test_a_text_alone_is_that_without_drafts(name: str, cache: CachePolicy | None):
    """Of the prompt's length and other lengths, with a beginning that was kept, and with stop strings."""
    model = model_of(name)
    cases: list[tuple[list[int], int, dict[str, Any]]] = [
        (PERIOD, 60, {}),
        (prompt(3, 1), 120, {}),
        (PERIOD, 1, {}),
        ([*PERIOD, 50], 33, {}),
        (prompt(3, 1), 90, {"stop": ["a", "e"]}),
    ]
    with drafting(model, cache=cache) as engine:
        for ids, most, options in cases:
            client = Client(ids, most, GenerationConfig(max_new_tokens=most, **options))
            engine.submit(client.job)
            assert client.texts() == [alone(model, client, cache)]
    assert engine.drafted.accepted > 20
    assert engine.drafted.passes + engine.drafted.accepted < engine.new_tokens
    assert engine.drafted.passes < 0.9 * engine.new_tokens


def test_a_draft_model_and_the_most_drafts():
    """The model itself proposes what it chooses, so that nearly all is accepted."""
    model = model_of("rotary")
    for most in (1, 4):
        client = Client(prompt(5, 2), 51)
        with drafting(model, model, draft_tokens=most) as engine:
            engine.submit(client.job)
            assert client.texts() == [alone(model, client)]
        assert engine.drafted.accepted == engine.drafted.proposed
        assert engine.drafted.passes == -(-50 // (most + 1))


def test_texts_that_join_and_leave_are_read_without_drafts():
    """Also those with other settings: each has the text that it has alone."""
    model = model_of("rotary")
    sampled = GenerationConfig.from_dict(
        {"max_new_tokens": 40, "sampling": {"do_sample": True, "seed": 5, "temperature": 1.5}}
    )
    clients = [Client(PERIOD, 200), Client(prompt(9, 3), 30), Client(PERIOD, 40, sampled)]
    clients.append(Client(prompt(4, 4), 30, GenerationConfig(max_new_tokens=30, repetition_penalty=1.4)))
    with drafting(model) as engine:
        engine.submit(clients[0].job)
        pieces = 0
        while pieces < 20:  # the first text is alone for a while
            pieces += isinstance(clients[0].events.get(timeout=60), Piece)
        for client in clients[1:]:
            engine.submit(client.job)
        texts = [client.texts()[0] for client in clients]
    wanted = [alone(model, client) for client in clients]
    assert wanted[0].endswith(texts[0])
    assert texts[1:] == wanted[1:]
    assert engine.drafted.accepted > 20


def test_a_text_that_is_left_frees_the_engine():
    model = model_of("rotary")
    left, following = Client(PERIOD, 500), Client(prompt(3, 1), 20)
    with drafting(model) as engine:
        engine.submit(left.job)
        while not isinstance(left.events.get(timeout=60), Piece):
            pass
        left.job.cancelled.set()
        engine.submit(following.job)
        assert following.texts() == [alone(model, following)]
    assert not any(isinstance(event, Ended) for event in left.events.queue)


def test_what_cannot_have_drafts_is_refused():
    model = model_of("rotary")
    cases: list[tuple[Any, Any, CachePolicy | None, str]] = [
        (model_of("recurrent"), "lookup", None, "draft: the states of this model are not caches"),
        (model, create_model("decoder-tiny", vocab_size=7), None, "draft: expected a model of the same voc"),
        (model, "look-up", None, "draft: expected a model, 'lookup', 'self' or a Drafter"),
        (model, "self", None, "draft: 'self' is for texts of `generate`"),
        (model, "lookup", CachePolicy.from_dict("snapkv(budget=64)"), "draft: the states of this model"),
    ]
    for served_model, draft, cache, message in cases:
        with pytest.raises(InputError, match=message):
            DraftingEngine(served_model, TOKENIZER, Limits(), cache, drafting=Drafting(draft=draft))


def test_the_command_serves_with_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = chat_folder(tmp_path / "tiny")
    request = {"model": "tiny", "prompt": PERIOD, "max_tokens": 40, "temperature": 0}
    texts = []
    for words in ((), ("--draft", "lookup", "--lookup-ngram", 2), ("--draft", folder, "--draft-tokens", 3)):
        with served(folder, *words, key=None) as (_, address):
            texts.append(client_of(address).completions.create(**request).choices[0].text)
    assert len(texts[0]) > 10
    assert texts == [texts[0]] * 3
    for words, message in (
        (["--draft-tokens", "3"], "--draft-tokens: requires --draft"),
        (["--draft", str(folder), "--lookup-ngram", "3"], "--lookup-ngram: requires --draft lookup"),
        (["--draft", str(tmp_path / "none")], "none"),
    ):
        assert main(["serve", str(folder), *words]) != 0
        assert message in capsys.readouterr().err
