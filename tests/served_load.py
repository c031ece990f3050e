"""The load of `polyformer serve` on this machine: many clients at once, and hostile ones among them.

    python tests/served_load.py MODEL --clients 32 --seconds 300

A server of MODEL, a chat model, starts on a free port of 127.0.0.1. One client measures it alone, then all
clients for the time: the first half without others, the second with hostile requests, each of which must
get a status of 4xx in OpenAI's form. Ordinary requests must succeed. The program ends by itself, with status
1 if something failed, and prints a table.
"""

import argparse
import dataclasses
import http.client
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLIENTS, SECONDS = 256, 3600.0
"""The most clients and the longest time of a run."""

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

SYSTEM = "You answer in one short sentence. You are friendly, and you say so if you do not know an answer."
QUESTIONS = (
    *(
        "What is the capital of France?",
        "Name three fruits.",
        "Why is the sky blue?",
        "Write a line about snow.",
    ),
    *("How many days has a week?", "What do bees make?", "Translate 'dog' to German.", "Who wrote Hamlet?"),
)
TOKENS = 24, 48
"""New tokens of short and long replies."""

REACHED = 0.1
"""The growth of the server's memory, as a share, that counts as a leak."""


@dataclasses.dataclass
class Figures:
    """What clients saw. texts: of ordinary requests, by request. failures: what must not happen."""

    requests: int = 0
    refused: int = 0
    left: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    first: list[float] = dataclasses.field(default_factory=list)
    texts: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def fail(self, what: str) -> None:
        """Record a failure."""
        with self.lock:
            self.failures.append(what)


class Server:
    """The address of a server of `name`, and its process."""

    def __init__(self, address: str, pid: int, name: str):
        self.host, self.pid, self.name = address.removeprefix("http://"), pid, name

    @contextmanager
    def sent(self, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        """The reply to a request; its connection is closed at the end."""
        connection = http.client.HTTPConnection(self.host, timeout=300)
        try:
            headers = {"content-type": "application/json"}
            connection.request("GET" if body is None else "POST", path, body, headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def number(self, name: str) -> float:
        """A number of the metrics."""
        with self.sent("/metrics", None) as reply:
            lines = reply.read().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"polyformer_{name} "))

    def memory(self) -> float:
        """The memory of the process in MiB; 0 where the system does not tell."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return 0.0
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def request_of(number: int, name: str) -> dict[str, Any]:
    """The ordinary request of a number: a question, which is asked with and without a stream in turn."""
    question = QUESTIONS[number % len(QUESTIONS)]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    common = {"model": name, "messages": messages, "temperature": 0}
    return {**common, "max_tokens": TOKENS[number % len(TOKENS)], "stream": number // len(QUESTIONS) % 2 > 0}


def hostile_bodies(name: str) -> list[tuple[str, str, bytes]]:
    """Requests that a server must refuse: a name, the path and the body."""
    chat = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    bomb = {
        "allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in "abcd"]} for i in range(12)]
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": bomb}}
    changes: dict[str, dict[str, Any]] = {
        "1,000 stop strings": {"stop": [str(i) for i in range(1000)]},
        "a temperature as a text": {"temperature": "1"},
        "messages that are a number": {"messages": 5},
        "messages without a role": {"messages": [{"content": "Hi"}]},
        "a prompt of 40,000 words": {"messages": [{"role": "user", "content": "word " * 40_000}]},
        "too many texts": {"n": 10**6},
        "a schema that explodes": {"response_format": form},
        "another model": {"model": "other"},
        "an unknown parameter": {"unheard_of": 1},
    }
    bodies = [(what, CHAT, json.dumps({**chat, **change}).encode()) for what, change in changes.items()]
    ids = {"model": name, "prompt": [10**9], "max_tokens": 4}
    return [
        *bodies,
        ("a prompt of 10 MB", COMPLETION, json.dumps({**ids, "prompt": "x" * 10_000_000}).encode()),
        ("ids beyond the vocabulary", COMPLETION, json.dumps(ids).encode()),
        ("100,000 brackets", COMPLETION, b"[" * 100_000),
        ("no JSON", COMPLETION, b"\x00\xff" * 500),
        ("an empty body", CHAT, b""),
        ("an unknown path", "/v1/nothing", b"{}"),
    ]


def ask(server: Server, number: int, figures: Figures) -> None:
    """Send an ordinary request, and record its text and times."""
    kind = number % len(QUESTIONS)
    request, start = request_of(number, server.name), time.monotonic()
    try:
        with server.sent(CHAT, json.dumps(request).encode()) as reply:
            if reply.status != 200:
                figures.fail(f"an ordinary request got {reply.status}: {reply.read()[:200]!r}")
                return
            first, text = start, ""
            if request["stream"]:
                for part in pieces(reply):
                    first = time.monotonic() if first == start else first
                    text += part
            else:
                text = json.loads(reply.read())["choices"][0]["message"]["content"]
    except (OSError, ValueError, http.client.HTTPException) as error:
        figures.fail(f"an ordinary request failed: {type(error).__name__}: {error}")
        return
    with figures.lock:
        figures.requests += 1
        figures.seconds.append(time.monotonic() - start)
        figures.first += [first - start] * (first > start)
        figures.texts.setdefault(kind, []).append(text)


def pieces(reply: http.client.HTTPResponse) -> Iterator[str]:
    """The texts of a stream; raises `ValueError` for one that does not end as it should."""
    for line in reply:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)["choices"][0]["delta"].get("content") or ""
    raise ValueError("the stream ended without [DONE]")


def attack(server: Server, what: str, path: str, body: bytes, figures: Figures) -> None:
    """Send a hostile request, which must get a status of 4xx in OpenAI's form."""
    try:
        with server.sent(path, body) as reply:
            status, content = reply.status, reply.read()
    except (BrokenPipeError, ConnectionResetError) as error:
        if len(body) < 2**22:  # of a body that is too large, the rest is not read
            figures.fail(f"{what}: {error}")
        status, content = 413, b'{"error": {"message": 0, "type": 0, "param": 0, "code": 0}}'
    error = json.loads(content).get("error", {})
    if not 400 <= status < 500 or set(error) != {"message", "type", "param", "code"}:
        figures.fail(f"{what} got {status}: {content[:200]!r}")
    with figures.lock:
        figures.refused += 1


def leave(server: Server, figures: Figures) -> None:
    """Begin a stream and leave it after its first event."""
    body = {**request_of(len(QUESTIONS), server.name), "max_tokens": 400}
    try:
        with server.sent(CHAT, json.dumps(body).encode()) as reply:
            if reply.status != 200:
                figures.fail(f"a stream that was left got {reply.status}")
            reply.readline()
    except OSError as error:
        figures.fail(f"a stream that was left: {error}")
    with figures.lock:
        figures.left += 1


def run_clients(server: Server, clients: int, seconds: float, figures: Figures) -> float:
    """Run ordinary clients for a time; return the tokens per second that the server generated."""
    end = time.monotonic() + seconds
    numbers = itertools.count(len(QUESTIONS))  # a stream first

    def client() -> None:
        while time.monotonic() < end and len(figures.failures) < 20:
            ask(server, next(numbers), figures)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    before, start = server.number("generated_tokens_total"), time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, end - time.monotonic()))
    rate = (server.number("generated_tokens_total") - before) / (time.monotonic() - start)
    for thread in threads:
        thread.join()
    return rate


@contextmanager
def hostile_clients(server: Server, figures: Figures, pause: float = 0.1) -> Iterator[None]:
    """Two clients that send hostile requests in turn, and a third that leaves streams."""
    over, bodies = threading.Event(), hostile_bodies(server.name)

    def hostile(first: int) -> None:
        for what, path, body in itertools.cycle(bodies[first:] + bodies[:first]):
            attack(server, what, path, body, figures)
            if over.wait(pause):
                return

    def leaving() -> None:
        while not over.wait(pause):
            leave(server, figures)

    threads = [threading.Thread(target=hostile, args=[0]), threading.Thread(target=hostile, args=[5])]
    threads.append(threading.Thread(target=leaving))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def recorded_memory(server: Server, sizes: list[float], every: float) -> Iterator[None]:
    """Add the memory of the server to `sizes`, once in `every` seconds."""
    over = threading.Event()

    def record() -> None:
        while not over.wait(every):
            sizes.append(server.memory())

    thread = threading.Thread(target=record)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(server: Server, clients: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a server by name, and its failures."""
    single, half, attacked, sizes = Figures(), Figures(), Figures(), list[float]()
    for number in range(len(QUESTIONS)):  # each text, computed alone
        ask(server, number, single)
    single.seconds.clear()
    single.first.clear()
    alone = run_clients(server, 1, seconds / 10, single)
    start = server.memory()
    with recorded_memory(server, sizes, seconds / 100):
        together = run_clients(server, clients, seconds / 2, half)
        with hostile_clients(server, attacked):
            disturbed = run_clients(server, clients, seconds / 2, attacked)
    failures = [*single.failures, *half.failures, *attacked.failures]
    waited = time.monotonic() + 60
    while server.number("running_texts") or server.number("waiting_texts"):
        if time.monotonic() > waited:
            failures.append("texts are left in the server after the last client")
            break
        time.sleep(0.1)
    early, late = max(sizes[20:40], default=start), max(sizes[80:], default=start)
    if late > early * (1 + REACHED):
        failures.append(f"memory grew from {early:.0f} to {late:.0f} MiB")
    texts = [(kind, text) for each in (half, attacked) for kind, some in each.texts.items() for text in some]
    return {
        "tokens/s of one client": round(alone, 1),
        f"tokens/s of {clients} clients": round(together, 1),
        "the same with hostile requests": round(disturbed, 1),
        "ordinary requests": half.requests + attacked.requests,
        "texts equal to those computed alone": sum(text == single.texts[kind][0] for kind, text in texts),
        "seconds to the first token, alone": quantiles(single.first),
        "seconds to the first token, together": quantiles(half.first),
        "the same with hostile requests ": quantiles(attacked.first),
        "seconds of a request, together": quantiles(half.seconds),
        "hostile requests, refused with 4xx": attacked.refused,
        "streams that were left": attacked.left,
        "MiB at the start": round(start),
        "MiB, most in 20 to 40 % of the time": round(early),
        "MiB, most in the last 20 %": round(late),
        "failures": failures,
    }


def quantiles(values: Sequence[float]) -> str:
    """The median and the 95th percentile."""
    if len(values) < 2:
        return "none"
    return f"{statistics.median(values):.2f}, {statistics.quantiles(values, n=20)[-1]:.2f}"


@contextmanager
def started(model: str, clients: int) -> Iterator[Server]:
    """A server of a model on a free port, which ends at the end."""
    limits = ["--max-batch", clients, "--max-queue", 4 * clients, "--max-tokens", 1024]
    words = [sys.executable, "-m", "polyformer", "serve", model, "--port", 0, "--name", "load", *limits]
    process = subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.endswith("/v1\n"):
        raise SystemExit(f"the server of {model} has not started, status {process.wait()}")
    try:
        server = Server(line.split()[-1].removesuffix("/v1"), process.pid, "load")
        while True:
            try:
                server.number("running_texts")
                break
            except OSError:
                time.sleep(0.1)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> int:
    """Print the figures; the status is 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    if not (1 <= options.clients <= CLIENTS and 0 < options.seconds <= SECONDS):
        parser.error(f"expected 1 to {CLIENTS} clients and up to {SECONDS:g} seconds")
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    with started(options.model, options.clients) as server:
        figures = measure(server, options.clients, options.seconds)
    for name, value in {"load of the machine before": round(busy, 2), **figures}.items():
        print(f"{name:40} {value}")
    return int(bool(figures["failures"]))


if __name__ == "__main__":
    sys.exit(main())
