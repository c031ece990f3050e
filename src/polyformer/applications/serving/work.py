"""From a request to jobs of the engine, and from their events to the choices of a reply."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from polyformer.applications.serving.engine import Engine, Overloaded, deadline_after
from polyformer.applications.serving.grammars import Grammar, Grammars
from polyformer.applications.serving.replies import ApiError, GrowingChoice, Reply
from polyformer.applications.serving.requests import ChatRequest, CompletionRequest, Prompt, TextRequest
from polyformer.applications.serving.rows import Ended, Event, Failed, Job, Piece, PromptRead
from polyformer.applications.serving.tools import OPEN, ToolReply
from polyformer.core.errors import InputError
from polyformer.models.generation import BeamConfig, ContrastiveConfig, DolaConfig, GenerationConfig
from polyformer.models.generation.generate import special_ids

DEFAULT_TOKENS = 16
"""New tokens of a completion without `max_tokens`, as in OpenAI's API."""


class Prompts:
    """Converts requests to token ids and settings, for a loaded model `Continuer` with limits.

    tokens, texts: of a text with its prompt, and of a request.

    The work of a request is done in a thread: tokenizing megabytes takes a second.
    """

    def __init__(self, loaded: Any, tokens: int, texts: int):
        self.loaded, self.tokens, self.texts = loaded, tokens, texts
        self.tokenizer = loaded.task.tokenizer
        vocabulary = self.tokenizer.backend.get_vocab(with_added_tokens=True)
        self.longest = max(map(len, vocabulary))
        self.grammars = Grammars(self.tokenizer, loaded.model.config.vocab_size)

    def of_chat(self, request: ChatRequest) -> list[list[int]]:
        """Return the ids of a conversation."""
        if self.tokenizer.chat is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions", "model")
        if request.shown_tools and "tools" not in self.tokenizer.chat.source(request.shown_tools):
            raise ApiError(400, "tools: the chat template of this model shows none; leave them out", "tools")
        size = sum(len(message["content"] or "") for message in request.messages)
        self._check_length(size, "messages")
        try:
            text = self.tokenizer.chat.render(request.messages, **request.rendering())
        except InputError as error:
            raise ApiError(400, str(error), "messages", "chat_template") from error
        self._check_length(len(text), "messages")
        return [self.tokenizer.encode_chat(text)[0]]

    def reply_kind(self, request: TextRequest) -> Callable[..., Reply]:
        """Return the class of the reply to a request: with calls if the template has their marks."""
        if not isinstance(request, ChatRequest) or not request.shown_tools:
            return Reply
        if OPEN not in self.tokenizer.chat.source(request.shown_tools):
            return Reply
        return functools.partial(ToolReply, most=1 if request.parallel_tool_calls is False else None)

    def of_completion(self, request: CompletionRequest) -> list[list[int]]:
        """Return the ids of each prompt; an empty one begins with the model's first token."""
        return [self._ids(prompt) for prompt in request.prompt]

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt")
            ids = self.loaded.task.start(prompt)
        else:
            size = self.loaded.model.config.vocab_size
            if not all(0 <= number < size for number in prompt):
                raise ApiError(400, f"prompt: expected token ids from 0 to {size - 1}", "prompt")
            ids = prompt
        if not ids:
            raise ApiError(400, "prompt: expected a text of one token or more", "prompt")
        return ids

    def _check_length(self, characters: int, name: str) -> None:
        """Refuse a text that has too many tokens however it is split, before the work of splitting it."""
        if characters > self.tokens * self.longest:
            raise too_long(f"more than {self.tokens}", self.tokens, name)

    def jobs(self, request: TextRequest, rows: Sequence[list[int]], seconds: float) -> list[Job]:
        """Return a job for each prompt; raise `ApiError` for settings and lengths that are not possible."""
        chat = isinstance(request, ChatRequest)
        asked = request.max_tokens
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            asked = request.max_completion_tokens
        echo = isinstance(request, CompletionRequest) and bool(request.echo)
        try:
            config = self._config(request, chat)
            lengths = [self._new_tokens(config, len(ids), chat, asked) for ids in rows]
            grammar = self._grammar(request, config)
        except InputError as error:
            name = str(error).partition(":")[0]
            raise ApiError(400, str(error), name if name in type(request).model_fields else None) from error
        if len(rows) * request.count > self.texts:
            raise ApiError(400, f"prompt: expected at most {self.texts} texts in a request", "prompt")
        deadline = deadline_after(seconds)
        return [
            Job(
                ids,
                dataclasses.replace(
                    config,
                    max_new_tokens=max(1, most),
                    min_new_tokens=min(config.min_new_tokens, max(1, most)),
                ),
                most,
                count=request.count,
                scores=request.scored,
                prompt_scores=echo and request.scored is not None,
                frequency_penalty=request.frequency_penalty or 0.0,
                presence_penalty=request.presence_penalty or 0.0,
                grammar=grammar,
                deadline=deadline,
            )
            for ids, most in zip(rows, lengths)
        ]

    def _grammar(self, request: TextRequest, config: GenerationConfig) -> Grammar | None:
        """Return the grammar of a reply in JSON, None for any text; raise `InputError` for its schema."""
        if not isinstance(request, ChatRequest) or request.response_format is None:
            return None
        schema = request.response_format.wanted
        if schema is None:
            return None
        return self.grammars.of_schema(schema, special_ids(self.loaded.model, config).eos)

    def _new_tokens(self, config: GenerationConfig, length: int, chat: bool, asked: int | None) -> int:
        """Return the most new tokens after a prompt; raise `ApiError` if they do not fit."""
        room = self.tokens - length
        if room < (1 if asked is None else asked):
            count = f"{length} and {asked or 1} new ones"
            raise too_long(count, self.tokens, "messages" if chat else "prompt")
        if asked is not None:
            return asked
        return min(room, config.lengths(length)[1] if chat else DEFAULT_TOKENS)

    def _config(self, request: TextRequest, chat: bool) -> GenerationConfig:
        """Return the settings of a text that is generated token by token; the checkpoint has the defaults."""
        settings = request.settings()
        config = self.loaded.reply_settings(settings) if chat else self.loaded.settings(settings)
        return dataclasses.replace(
            config,
            stop=request.stop or config.stop,
            num_return_sequences=1,
            beam=BeamConfig(),
            contrastive=ContrastiveConfig(),
            dola=DolaConfig(),
            cache=None,
        )


def too_long(count: str, most: int, name: str) -> ApiError:
    """Return the error for a text of too many tokens."""
    message = f"{name}: the model reads and generates at most {most} tokens, got {count}; shorten it"
    return ApiError(400, message, name, "context_length_exceeded")


class Work:
    """The jobs of a request in the engine. Use it as a context: at its end the engine forgets them."""

    def __init__(self, engine: Engine, jobs: Sequence[Job]):
        self.engine, self.jobs = engine, jobs
        self.loop = asyncio.get_running_loop()
        self.inbox: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.first_token: float | None = None  # when the first token came, on the monotonic clock
        self.shared = 0  # tokens of the prompts that were read before
        for number, job in enumerate(jobs):
            job.send = functools.partial(self._send, number)

    def __enter__(self) -> "Work":
        try:
            self.engine.submit(*self.jobs)
        except Overloaded as error:
            raise ApiError(503, f"{error}; try again later", code="overloaded") from error
        return self

    def __exit__(self, *error: object) -> None:
        for job in self.jobs:
            job.cancelled.set()

    def _send(self, number: int, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended with the server
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, (number, event))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events with the indices of their choices, up to the last.

        Raises `ApiError` for a request that failed.
        """
        left = sum(job.count for job in self.jobs)
        while left:
            number, event = await self.inbox.get()
            if isinstance(event, Failed):
                raise ApiError(503 if event.overloaded else 500, event.message, code="generation_failed")
            start = sum(job.count for job in self.jobs[:number])
            if isinstance(event, PromptRead):
                self.shared += event.shared
                for index in range(self.jobs[number].count):
                    yield start + index, event
                continue
            if isinstance(event, Piece) and self.first_token is None:
                self.first_token = time.monotonic()
            left -= isinstance(event, Ended)
            yield start + event.index, event

    async def choices(self) -> list[GrowingChoice]:
        """Return all texts."""
        choices = [GrowingChoice(index) for index in range(sum(job.count for job in self.jobs))]
        async for index, event in self.events():
            choice = choices[index]
            if isinstance(event, Ended):
                choice.reason = event.reason
                continue
            assert isinstance(event, PromptRead | Piece)
            choice.scores += event.scores
            if isinstance(event, Piece):
                choice.text += event.text
                choice.tokens += 1
        return choices
