"""`polyformer serve`: a real process on this machine, real clients, and what hostile ones send."""

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

import polyformer  # noqa: E402
from chat_models import chat_folder  # noqa: E402
from chat_templates import turn  # noqa: E402
from forking import Program, start_python  # noqa: E402

KEY = "secret"
LIMITS = ("--max-batch", 8, "--max-queue", 40, "--max-tokens", 400, "--max-bytes", 300_000)


@contextmanager
def served(folder: Path, *words: object, key: str | None = KEY) -> Iterator[tuple[Program, str]]:
    """A running server and its address."""
    command = ["-m", "polyformer", "serve", folder, "--port", 0, "--name", "tiny", "--device", "cpu", *words]
    program = start_python(*command, env={} if key is None else {"POLYFORMER_API_KEY": key})
    try:
        output = Path(program.folder.name, "stdout")
        while not (output.exists() and output.read_text().endswith("/v1\n")):
            assert program.poll() is None, program.ended().stderr[-3000:]
            time.sleep(0.05)
        address = output.read_text().split()[-1].removesuffix("/v1")
        while _status(address, "/health") != 200:
            time.sleep(0.05)
        yield program, address
    finally:
        if program.poll() is None:
            program.kill_all()
        else:
            program.folder.cleanup()


def _status(address: str, path: str) -> int | None:
    try:
        return sent(address, "GET", path)[0]
    except OSError:
        return None


def sent(
    address: str, method: str, path: str, body: bytes | str | None = None, key: str | None = KEY
) -> tuple[int, bytes]:
    """The status and the body of a reply."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    headers = {"content-type": "application/json"} | (
        {} if key is None else {"authorization": f"Bearer {key}"}
    )
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return polyformer.load(folder, "cpu")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder, *LIMITS) as (_, place):
        yield place


@pytest.fixture
def client(address: str) -> Any:
    return client_of(address)


def client_of(address: str, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, **options)


def number_of(address: str, name: str) -> float:
    """A number of the metrics."""
    lines = sent(address, "GET", "/metrics")[1].decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))


def continued(model: Any, text: str, **settings: Any) -> str:
    ids = torch.tensor([model.task.start(text)])
    config = model.settings(settings)
    return model.model.generate(ids, None, config, None, model.task.tokenizer.decode).texts(
        model.task.tokenizer.decode, config.stop
    )[0]


def test_models(client: Any):
    assert [card.id for card in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "polyformer"
    with pytest.raises(openai.NotFoundError, match="expected 'tiny'"):
        client.models.retrieve("other")


def test_a_chat_is_that_of_the_library(client: Any, model: Any):
    messages = [
        turn("system", "Be brief."),
        turn("user", "Anna"),
        turn("assistant", "Yes."),
        turn("user", "Tom"),
    ]
    expected = model.chat(messages, max_new_tokens=20)
    reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    ids = model.task.tokenizer.encode_chat(
        model.task.tokenizer.chat.render(messages, add_generation_prompt=True)
    )[0]
    assert reply.usage.prompt_tokens == len(ids)
    assert reply.usage.completion_tokens <= 20
    again = client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
    assert again.choices[0].message.content == expected
    assert again.usage.prompt_tokens_details.cached_tokens == len(ids) - 1
    assert choice.finish_reason == ("length" if reply.usage.completion_tokens == 20 else "stop")
    parts = [turn("user", [{"type": "text", "text": "An"}, {"type": "text", "text": "na"}])]
    reply = client.chat.completions.create(model="tiny", messages=parts, max_completion_tokens=9, seed=3)
    assert reply.choices[0].message.content == model.chat([turn("user", "Anna")], max_new_tokens=9, seed=3)


def test_a_stream_has_the_same_text_in_pieces(client: Any, model: Any):
    messages, expected = [turn("user", "Anna")], model.chat([turn("user", "Anna")], max_new_tokens=30)
    options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1}
    chunks = [*client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, n=2, **options)]
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == expected
        assert [choice.finish_reason for choice in own][-1] in ("stop", "length")
        assert [choice.finish_reason for choice in own][:-1] == [None] * (len(own) - 1)
        scored = sum(len(choice.logprobs.content) for choice in own if choice.logprobs)
        assert scored == chunks[-1].usage.completion_tokens / 2
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_with_their_options(client: Any, model: Any):
    create = client.completions.create
    plain = create(model="tiny", prompt="Anna and", max_tokens=12).choices[0]
    assert plain.text == continued(model, "Anna and", max_new_tokens=12)
    settings = {"temperature": 0.8, "top_p": 0.9, "seed": 4}
    drawn = create(model="tiny", prompt=["Anna", "Tom"], max_tokens=12, n=2, **settings).choices
    assert [choice.index for choice in drawn] == [0, 1, 2, 3]
    expected = [
        continued(model, text, max_new_tokens=12, **{**settings, "seed": seed})
        for text in ("Anna", "Tom")
        for seed in (4, 5)
    ]
    assert [choice.text for choice in drawn] == expected
    greedy = create(model="tiny", prompt="Anna", max_tokens=8, temperature=0, seed=9, top_p=0.5)
    assert greedy.choices[0].text == continued(model, "Anna", max_new_tokens=8)
    assert create(model="tiny", prompt="", max_tokens=5).choices[0].text == continued(
        model, "", max_new_tokens=5
    )
    extra = create(model="tiny", prompt="Anna", max_tokens=8, extra_body={"repetition_penalty": 1.7})
    assert extra.choices[0].text == continued(model, "Anna", max_new_tokens=8, repetition_penalty=1.7)
    text = continued(model, "Anna", max_new_tokens=30)
    stop = next(c for c in text if c.isascii() and c.isprintable())
    ended = create(model="tiny", prompt="Anna", max_tokens=30, stop=[stop, "never"]).choices[0]
    assert (ended.text, ended.finish_reason) == (text[: text.index(stop)], "stop")
    pieces = [*create(model="tiny", prompt="Anna", max_tokens=30, stream=True, echo=True)]
    assert "".join(chunk.choices[0].text for chunk in pieces) == "Anna" + text
    assert create(model="tiny", prompt="Anna", max_tokens=40, frequency_penalty=2).choices[0].text != text


def test_scores_of_a_prompt_and_its_continuation(client: Any, model: Any):
    ids = model.task.tokenizer.encode("Anna and Tom flew")
    reply = client.completions.create(
        model="tiny", prompt=ids, max_tokens=2, echo=True, logprobs=2, temperature=0
    )
    scores = reply.choices[0].logprobs
    new = model.model.generate(
        torch.tensor([ids]), config=model.settings({"max_new_tokens": 2})
    ).new_tokens()[0]
    logs = model.model(torch.tensor([[*ids, *new]])).logits[0].log_softmax(-1)[:-1]
    own = logs.gather(1, torch.tensor([*ids[1:], *new]).unsqueeze(1)).squeeze(1)
    assert scores.token_logprobs[0] is None
    torch.testing.assert_close(torch.tensor(scores.token_logprobs[1:]), own)
    assert max(scores.top_logprobs[-1].values()) == scores.token_logprobs[-1]
    assert scores.tokens[: len(ids)] == [model.task.tokenizer.decode([i], keep_special=True) for i in ids]
    assert scores.text_offset[1] == len(scores.tokens[0])
    assert reply.choices[0].text.startswith("Anna and Tom flew")
    only = client.completions.create(model="tiny", prompt="Anna", max_tokens=0, echo=True, logprobs=0)
    assert only.choices[0].text == "Anna"
    assert only.usage.completion_tokens == 0


def test_sixteen_clients_at_once_get_what_each_gets_alone(address: str, model: Any):
    def ask(number: int) -> str:
        options = {"temperature": 0.9, "seed": number} if number % 2 else {}
        reply = client_of(address).completions.create(
            model="tiny", prompt="Anna and Tom " * (1 + number), max_tokens=10 + 3 * number, **options
        )
        return reply.choices[0].text

    with ThreadPoolExecutor(16) as clients:
        together = [*clients.map(ask, range(16))]
    assert together == [ask(number) for number in range(16)]
    assert together[2] == continued(model, "Anna and Tom " * 3, max_new_tokens=16)
    assert together[3] == continued(model, "Anna and Tom " * 4, max_new_tokens=19, temperature=0.9, seed=3)


def test_a_stream_that_is_left_ends(address: str):
    before = number_of(address, "polyformer_generated_tokens_total")
    clients = [client_of(address) for _ in range(4)]
    streams = [
        each.completions.create(model="tiny", prompt=[5, 6], max_tokens=390, stream=True) for each in clients
    ]
    for stream in streams:
        next(iter(stream))
        stream.close()
    while number_of(address, "polyformer_running_texts"):
        time.sleep(0.05)
    assert number_of(address, "polyformer_generated_tokens_total") - before < 4 * 390
    # A client that waits for the whole text and leaves.
    early = client_of(address, timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        early.completions.create(model="tiny", prompt=[5, 6], max_tokens=390, n=8)
    while number_of(address, "polyformer_running_texts"):
        time.sleep(0.05)


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 401}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 9}, "n"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"best_of": 3}, None),
        ({"suffix": "x"}, "suffix"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "word " * 40_000}, "prompt"),
        ({"prompt": "\ud800"}, None),
        ({"prompt": ["a"] * 41}, "prompt"),
        ({"prompt": ["a"] * 300}, "prompt"),
        ({"model": None}, "model"),
        ({"model": "other"}, "model"),
    ],
)
def test_wrong_parameters_are_refused_by_name(address: str, change: dict[str, Any], param: str | None):
    request = {"model": "tiny", "prompt": "Anna", "max_tokens": 3, **change}
    status, body = sent(address, "POST", "/v1/completions", json.dumps(request))
    error = json.loads(body)["error"]
    assert status == (404 if change.get("model") == "other" else 400), body
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert len(body) < 1000


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": "Hi"},
        {"messages": [turn("king", "Hi")]},
        {"messages": [turn("user", 5)]},
        {"messages": [turn("user", None)]},
        {"messages": [turn("user", [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])]},
        {"messages": [turn("user", "word " * 40_000)]},
        {"top_logprobs": -1},
        {"tools": "all"},
        {"tool_choice": "required"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": True}}},
        {"chat_template_kwargs": {"a": 1}, "continue_final_message": "yes"},
        {"max_tokens": 2, "stream_options": {"include_usage": 1}},
    ],
)
def test_wrong_chats_are_refused(address: str, change: dict[str, Any]):
    request = {"model": "tiny", "messages": [turn("user", "Hi")], **change}
    status, body = sent(address, "POST", "/v1/chat/completions", json.dumps(request))
    assert status == 400, body
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert b"passwd" not in body


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'"' + b"x" * 100 + b'"', 400),
        (b"[" * 100_000, 400),
        (b'{"model": "tiny", "prompt": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", 400),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
    ],
)
def test_bodies_that_are_no_requests(address: str, body: bytes, status: int):
    try:
        answer, content = sent(address, "POST", "/v1/completions", body)
    except (BrokenPipeError, ConnectionResetError):
        assert status == 413  # the server has closed the connection while the rest was on its way
        return
    assert answer == status, content[:300]
    assert json.loads(content)["error"]["message"]


def test_a_body_in_chunks_has_the_same_limit(address: str):
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        connection.sendall(head.encode() + b"transfer-encoding: chunked\r\n\r\n")
        answer = b""
        try:
            for _ in range(100):
                connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            answer = connection.recv(100)
        except (BrokenPipeError, ConnectionResetError):  # closed while the rest was on its way
            answer = b"413"
        assert b"413" in answer
    assert sent(address, "GET", "/health")[0] == 200


def test_other_paths_keys_and_methods(address: str):
    assert sent(address, "GET", "/health", key=None) == (200, b'{"status":"ok"}')
    for path in ("/v1/models", "/metrics", "/docs"):
        status, body = sent(address, "GET", path, key="other")
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    status, body = sent(address, "GET", "/v1/nothing")
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
    assert sent(address, "GET", "/v1/completions")[0] == 405
    assert sent(address, "POST", "/v1/embeddings", json.dumps({"model": "tiny", "input": "a"}))[0] == 400


def test_hostile_requests_do_not_change_others(address: str, model: Any):
    """While many are refused, a client gets its text."""
    expected = continued(model, "Anna", max_new_tokens=60)
    bodies = [b"[" * 100_000, json.dumps({"model": "tiny", "prompt": [10**9]}).encode(), b"\x00" * 1000]
    over = threading.Event()

    def disturb(body: bytes) -> None:
        while not over.is_set():
            assert 400 <= sent(address, "POST", "/v1/completions", body)[0] < 500

    with ThreadPoolExecutor(3) as others:
        running = [others.submit(disturb, body) for body in bodies]
        try:
            for _ in range(3):
                reply = client_of(address).completions.create(model="tiny", prompt="Anna", max_tokens=60)
                assert reply.choices[0].text == expected
        finally:
            over.set()
        for each in running:
            each.result()


def test_a_full_queue_asks_clients_to_come_again(folder: Path):
    with served(folder, "--max-batch", 1, "--max-queue", 2, "--max-tokens", 300, key=None) as (_, place):

        def ask(number: int) -> tuple[int, bytes]:
            request = {"model": "tiny", "prompt": [5, number + 6], "max_tokens": 250}
            return sent(place, "POST", "/v1/completions", json.dumps(request), key=None)

        with ThreadPoolExecutor(12) as clients:
            replies = [*clients.map(ask, range(12))]
    statuses = [status for status, _ in replies]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 2
    error = next(json.loads(body)["error"] for status, body in replies if status == 503)
    assert (error["type"], error["code"]) == ("overloaded_error", "overloaded")


def test_sigterm_ends_the_server_after_its_streams(folder: Path, model: Any):
    with served(folder, "--max-tokens", 1000, key=None) as (program, place):
        stream = client_of(place).completions.create(model="tiny", prompt="Anna", max_tokens=600, stream=True)
        chunks = iter(stream)
        first = next(chunks).choices[0].text
        program.send_signal(signal.SIGTERM)
        rest = [chunk.choices[0] for chunk in chunks]
        assert first + "".join(choice.text for choice in rest) == continued(model, "Anna", max_new_tokens=600)
        assert rest[-1].finish_reason in ("length", "stop")
        program.process.join(60)
        assert program.poll() == 0
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset
            sent(place, "GET", "/health")


def test_a_time_limit_ends_a_text(folder: Path):
    with served(folder, "--max-seconds", 0.5, "--max-tokens", 100_000, key=None) as (_, place):
        reply = client_of(place).completions.create(model="tiny", prompt=[5], max_tokens=90_000, logprobs=0)
        assert reply.choices[0].finish_reason in ("length", "stop")
        assert 0 < reply.usage.completion_tokens < 90_000
