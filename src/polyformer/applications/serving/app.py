"""The application: OpenAI's paths for a loaded model, as FastAPI serves them.

    GET  /health                 {"status": "ok"}, without a key
    GET  /metrics                numbers for Prometheus
    GET  /v1/models              the model
    POST /v1/chat/completions    replies, for models with a chat template
    POST /v1/completions         continuations, with log-probabilities, of the prompt too (`echo`)
    POST /v1/embeddings          vectors of texts, for encoders

Errors have OpenAI's form (`replies.ApiError`): 4xx for faults of the request, 503 where it can come again.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from polyformer.applications.serving.engine import Engine, Limits
from polyformer.applications.serving.guard import Guard, Metrics
from polyformer.applications.serving.replies import ApiError, Reply, event, usage_of, vectors_reply
from polyformer.applications.serving.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ModelRequest,
    TextRequest,
)
from polyformer.applications.serving.rows import Ended, Event, Piece, PromptRead
from polyformer.applications.serving.work import Prompts, Work
from polyformer.core.errors import InputError
from polyformer.nn.cache import CachePolicy

LEFT = 499
"""The status of a request whose client has left, in the numbers; nobody receives it."""


class ModelServer:
    """A loaded model with its name, engine and limits.

    pooling: of vectors, if the folder of the model does not define it. cache: the policy of the KV cache.
    engine: a kind of `Engine`.
    """

    def __init__(
        self,
        loaded: Any,
        name: str,
        limits: Limits,
        key: str | None = None,
        pooling: str | None = None,
        cache: CachePolicy | None = None,
        *,
        engine: Callable[..., Engine] = Engine,
    ):
        self.loaded, self.name, self.limits, self.key, self.pooling = loaded, name, limits, key, pooling
        self.engine: Engine | None = None
        self.prompts: Prompts | None = None
        if "generate" in loaded.can:
            self.engine = engine(loaded.model, loaded.task.tokenizer, limits, cache)
            self.prompts = Prompts(loaded, limits.tokens, limits.queue)
        self.metrics, self.created = Metrics(self.engine), int(time.time())
        self.embedding = threading.Lock()

    def check_model(self, request: ModelRequest) -> None:
        """Raise `ApiError` for another model."""
        if request.model != self.name:
            raise ApiError(404, f"model: expected {self.name!r}", "model", "model_not_found")

    async def texts(self, request: TextRequest, http: Request) -> Response:
        """Return the reply to a request for texts, whole or as a stream."""
        arrival = time.monotonic()
        self.check_model(request)
        if self.engine is None or self.prompts is None:
            raise ApiError(400, f"{self.name} generates no texts; use /v1/embeddings", "model")
        if request.count > self.limits.batch:
            raise ApiError(400, f"n: expected at most {self.limits.batch} texts", "n", "invalid_value")
        chat = isinstance(request, ChatRequest)
        read: Callable[..., list[list[int]]] = self.prompts.of_chat if chat else self.prompts.of_completion
        try:
            rows = await run_in_threadpool(read, request)
            jobs = await run_in_threadpool(self.prompts.jobs, request, rows, self.limits.seconds)
        except InputError as error:
            raise ApiError(400, str(error)) from error
        kind = self.prompts.reply_kind(request)
        reply = kind(self.name, self.prompts.tokenizer, chat, request.scored is not None)
        work = Work(self.engine, jobs)
        echoes = self._echoes(request, rows)
        if request.stream:
            work.__enter__()
            stream = self._stream(request, work, reply, echoes, arrival)
            return StreamingResponse(
                stream, media_type="text/event-stream", headers={"cache-control": "no-cache"}
            )
        with work:
            choices = await unless_left(http, work.choices())
        if choices is None:
            return Response(status_code=LEFT)
        self._note(work, arrival)
        for choice in choices:
            choice.text = echoes[choice.index] + choice.text
        return JSONResponse(reply.whole(choices, self._usage(work, sum(c.tokens for c in choices))))

    def _echoes(self, request: TextRequest, rows: list[list[int]]) -> list[str]:
        """Return the prompt before the text of each choice, or empty texts without `echo`."""
        if not isinstance(request, CompletionRequest) or not request.echo or self.prompts is None:
            return [""] * (len(rows) * request.count)
        decode = self.prompts.tokenizer.decode
        shown = [
            prompt if isinstance(prompt, str) else decode(ids) for prompt, ids in zip(request.prompt, rows)
        ]
        return [text for text in shown for _ in range(request.count)]

    def _note(self, work: Work, arrival: float) -> None:
        """Record the time to the first token."""
        if work.first_token is not None:
            self.metrics.first_token.observe(work.first_token - arrival)

    def _usage(self, work: Work, new: int) -> dict[str, Any]:
        return usage_of(sum(len(job.ids) for job in work.jobs), new, work.shared)

    async def _stream(
        self, request: TextRequest, work: Work, reply: Reply, echoes: list[str], arrival: float
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream; the engine forgets its jobs when the client leaves."""
        new = 0
        try:
            async for index, part in work.events():
                new += isinstance(part, Piece)
                chunk = chunk_of(reply, index, part, echoes[index])
                if chunk is not None:
                    yield event(chunk)
            if request.stream_options is not None and request.stream_options.include_usage:
                yield event(reply.usage_chunk(self._usage(work, new)))
            yield event("[DONE]")
        except ApiError as error:
            yield event(error.content)
        finally:
            work.__exit__()
            self._note(work, arrival)

    def embed(self, request: EmbeddingRequest) -> dict[str, Any]:
        """Return the vectors of texts; several requests are computed in turn."""
        self.check_model(request)
        if self.engine is not None or not self.loaded.reads_text:
            raise ApiError(400, f"{self.name} has no vectors of texts; serve an encoder", "model")
        try:
            with self.embedding:
                vectors = self.loaded.embed(request.input, self.pooling)
        except InputError as error:
            raise ApiError(400, str(error), "input") from error
        return vectors_reply(self.name, vectors, request.encoding_format, self._tokens(request.input))

    def _tokens(self, texts: list[str]) -> int:
        """Return the number of tokens of texts, before any is cut."""
        tokenizer = (
            getattr(self.loaded.task, "tokenizer", None) or self.loaded.encoder_of(self.pooling).tokenizer
        )
        return sum(len(ids) for ids, _ in tokenizer.encode_batch_for_model(texts))


def chunk_of(reply: Reply, index: int, part: Event, echo: str) -> dict[str, Any] | None:
    """Return the chunk of an event of a choice, or None for an event without text."""
    if isinstance(part, Ended):
        return reply.chunk(index, None if reply.chat else "", reason=part.reason)
    if isinstance(part, Piece):
        chunk = reply.chunk(index, part.text, part.scores)
        return chunk if part.scores or (part.text and chunk["choices"][0].get("delta") != {}) else None
    assert isinstance(part, PromptRead)
    if reply.chat:
        return reply.chunk(index, None)
    return reply.chunk(index, echo, part.scores) if echo or part.scores else None


async def unless_left(http: Request, result: Any) -> Any:
    """Return the result of a coroutine, or None if the client leaves before."""
    work, left = asyncio.ensure_future(result), asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        left.cancel()


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def create_app(server: ModelServer, more: APIRouter | None = None) -> Any:
    """Return the application of a server; its engine runs while the application does.

    more: further paths.
    """

    @contextlib.asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        if server.engine is None:
            yield
            return
        with server.engine:
            yield

    app = FastAPI(title="polyformer", lifespan=running)
    add_errors(app)
    add_information(app, server)
    add_work(app, server)
    if more is not None:
        app.include_router(more)
    paths = frozenset(getattr(route, "path", "") for route in app.routes)
    return Guard(app, server.limits, server.key, server.metrics, paths)


def add_information(app: FastAPI, server: ModelServer) -> None:
    """Add the paths that say something about the server."""

    @app.get("/health")
    def health() -> Response:
        alive = server.engine is None or server.engine.alive
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(server)]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        if name != server.name:
            raise ApiError(404, f"model: expected {server.name!r}", "model", "model_not_found")
        return _model_card(server)


def add_work(app: FastAPI, server: ModelServer) -> None:
    """Add the paths for which the model works."""

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, http: Request) -> Response:
        return await server.texts(request, http)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest, http: Request) -> Response:
        return await server.texts(request, http)

    @app.post("/v1/embeddings")
    def embeddings(request: EmbeddingRequest) -> dict[str, Any]:
        return server.embed(request)


def _model_card(server: ModelServer) -> dict[str, Any]:
    return {"id": server.name, "object": "model", "created": server.created, "owned_by": "polyformer"}


def add_errors(app: FastAPI) -> None:
    """Give all errors OpenAI's form; the client's text is not repeated."""

    @app.exception_handler(ApiError)
    def refused(_: Request, error: ApiError) -> Response:
        headers = {"retry-after": "1"} if error.status == 503 else {}
        return JSONResponse(error.content, error.status, headers)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        fault = error.errors()[0]
        names = [str(part) for part in fault["loc"] if part != "body"]
        param = names[0] if names and fault["type"] != "json_invalid" else None
        text = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            text = "unknown parameter; leave it out"
        message = f"{'.'.join(names)}: {text}" if param else f"body: {text}"
        missing = fault["type"] == "missing"
        code = "missing_required_parameter" if missing else "invalid_value"
        return JSONResponse(ApiError(400, message, param, code).content, 400)

    @app.exception_handler(HTTPException)
    def other(_: Request, error: HTTPException) -> Response:
        wrapped = ApiError(
            error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else None
        )
        return JSONResponse(wrapped.content, error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    def failed(_: Request, error: Exception) -> Response:
        message = f"the server failed with {type(error).__name__}; other requests are not affected"
        return JSONResponse(ApiError(500, message).content, 500)
