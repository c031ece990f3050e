"""What happens before and after every request: its size, the key, and the numbers for Prometheus.

An ASGI middleware reads the whole body first, so that no code sees more than the limit, and a client that
sends slowly holds nothing but its connection.
"""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import JSONResponse

from polyformer.applications.serving.engine import Engine, Limits
from polyformer.applications.serving.replies import ApiError

ARRIVAL = 30.0
"""Seconds for the body of a request to arrive."""

OPEN = "/health"
"""The path that needs no key."""

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class EngineCollector:
    """Reads the numbers of the engine for each request of the metrics."""

    def __init__(self, engine: Engine | None):
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the present numbers."""
        if self.engine is None:
            return
        load = self.engine.load
        yield GaugeMetricFamily("polyformer_running_texts", "Texts in the batch.", value=load.running)
        yield GaugeMetricFamily("polyformer_waiting_texts", "Texts in the queue.", value=load.waiting)
        counted = (
            ("prompt", load.prompt_tokens),
            ("shared", load.shared_tokens),
            ("generated", load.new_tokens),
        )
        for name, value in counted:
            yield CounterMetricFamily(f"polyformer_{name}_tokens", f"Tokens ({name}) so far.", value=value)


class Metrics:
    """The numbers of a server, in a separate registry."""

    def __init__(self, engine: Engine | None):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self.requests = Counter(
            "polyformer_requests", "Requests by path and status.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "polyformer_request_seconds",
            "Time from a request to the end of its reply.",
            ["path"],
            registry=self.registry,
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
        )
        self.first_token = Histogram(
            "polyformer_first_token_seconds",
            "Time from a request to the first token of its reply.",
            registry=self.registry,
            buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )


class Guard:
    """The middleware around an application.

    key: the key that clients must send as "Authorization: Bearer KEY"; None for none. paths: those that are
    counted by name.
    """

    def __init__(self, app: Any, limits: Limits, key: str | None, metrics: Metrics, paths: frozenset[str]):
        self.app, self.limits, self.metrics, self.paths = app, limits, metrics, paths
        self.key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, start, status = (
            scope["path"] if scope["path"] in self.paths else "other",
            time.monotonic(),
            [499],
        )

        async def noting(message: Any) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            self._check_key(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            # The rest of the body is not read, so that the connection has no use any more.
            headers = {"connection": "close"}
            reply = JSONResponse(error.content, error.status, headers)
            await reply(scope, receive, noting)
        else:
            if body is not None:
                await self.app(scope, replaying(body, receive), noting)
        finally:
            self.metrics.requests.labels(path, str(status[0])).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - start)

    def _check_key(self, scope: Any) -> None:
        if self.key is None or scope["path"] == OPEN:
            return
        sent = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(sent, self.key):
            raise ApiError(401, "Authorization: expected the key of this server", code="invalid_api_key")

    async def _body(self, scope: Any, receive: Receive) -> bytes | None:
        """Return the body; None if the client has left. Raises `ApiError` if it is too large or late."""
        most = self.limits.body
        too_large = ApiError(
            413, f"the request has more than {most} bytes; shorten it", code="request_too_large"
        )
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(ARRIVAL):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the request did not arrive within {ARRIVAL:g} s", code="timeout") from None


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives the whole body first, then what follows."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Any:
        return pending.pop() if pending else await receive()

    return receive_again
