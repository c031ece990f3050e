"""Replies in OpenAI's form: completions, chats, their chunks in a stream, vectors and errors."""

import base64
import dataclasses
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyformer.applications.serving.rows import Reason, TokenScore
from polyformer.data import Tokenizer


class ApiError(Exception):
    """An error that a client receives: {"error": {"message", "type", "param", "code"}} with a status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def content(self) -> dict[str, Any]:
        """The body of the reply."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "overloaded_error"}
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, default)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclasses.dataclass
class GrowingChoice:
    """A text that grows by its pieces."""

    index: int
    text: str = ""
    scores: list[TokenScore] = dataclasses.field(default_factory=list)
    tokens: int = 0
    reason: Reason | None = None


@dataclasses.dataclass
class Reply:
    """The shared part of the chunks of a reply. chat: whether it is of /v1/chat/completions.

    offset: of each choice, the characters before the next token's text, in completions with scores.
    """

    model: str
    tokenizer: Tokenizer
    chat: bool
    scored: bool
    id: str = ""
    created: int = 0
    offsets: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def whole(self, choices: Sequence[GrowingChoice], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the reply with all texts."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [self._whole_choice(c) for c in choices], "usage": usage}

    def chunk(
        self, index: int, text: str | None, scores: Sequence[TokenScore] = (), reason: Reason | None = None
    ) -> dict[str, Any]:
        """Return a chunk of a stream; without a text, the start of a choice or its end."""
        logprobs = self.logprobs(index, scores) if self.scored and scores else None
        part: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": reason}
        if self.chat:
            part["delta"] = {} if text is None else {"content": text}
            if text is None and reason is None:
                part["delta"] = {"role": "assistant", "content": ""}
        else:
            part["text"] = text or ""
        return {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": [part]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk with the numbers of tokens, the last of a stream."""
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return {**head, "choices": [], "usage": usage}

    def logprobs(self, index: int, scores: Sequence[TokenScore]) -> dict[str, Any]:
        """Return the scores of tokens in the form of chats or of completions."""
        if self.chat:
            return {"content": [self._chat_score(score) for score in scores], "refusal": None}
        tokens = [self._token(score.id) for score in scores]
        offsets, place = [], self.offsets.get(index, 0)
        for token in tokens:
            offsets.append(place)
            place += len(token)
        self.offsets[index] = place
        return {
            "tokens": tokens,
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [None if score.logprob is None else self._best(score) for score in scores],
            "text_offset": offsets,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _whole_choice(self, choice: GrowingChoice) -> dict[str, Any]:
        logprobs = self.logprobs(choice.index, choice.scores) if self.scored else None
        part: dict[str, Any] = {"index": choice.index, "logprobs": logprobs, "finish_reason": choice.reason}
        if self.chat:
            return {**part, "message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {**part, "text": choice.text}

    def _token(self, number: int) -> str:
        return self.tokenizer.decode([number], keep_special=True)

    def _best(self, score: TokenScore) -> dict[str, float]:
        """Return the most probable tokens by their texts; of equal texts, such as parts of characters, the
        most probable."""
        best: dict[str, float] = {}
        for number, value in score.top:
            best.setdefault(self._token(number), value)
        return best

    def _chat_score(self, score: TokenScore) -> dict[str, Any]:
        return {
            **self._chat_token(score.id, score.logprob or 0.0),
            "top_logprobs": [self._chat_token(number, value) for number, value in score.top],
        }

    def _chat_token(self, number: int, value: float) -> dict[str, Any]:
        text = self._token(number)
        return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}


def usage_of(prompt_tokens: int, new_tokens: int, shared: int) -> dict[str, Any]:
    """Return the numbers of tokens of a request. shared: of the prompt, read before for another text."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": shared},
    }


def event(data: dict[str, Any] | str) -> bytes:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)
    return f"data: {text}\n\n".encode("utf-8", "replace")


def vectors_reply(model: str, vectors: Any, encoding: str | None, tokens: int) -> dict[str, Any]:
    """Return the vectors [N, E] of texts, as numbers or as the base64 of little-endian float32."""
    numbers = np.asarray(vectors, dtype="<f4")
    coded = [
        base64.b64encode(row.tobytes()).decode() if encoding == "base64" else row.tolist() for row in numbers
    ]
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(coded)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
