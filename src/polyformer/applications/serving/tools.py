"""Calls of functions: from OpenAI's `tools` to a chat template, and from a reply's text to its `tool_calls`.

    tools         JSON schemas of functions; the chat template shows them to the model
    text          It rains there. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
    content       It rains there.
    tool_calls    [{"id": ..., "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]

The client runs the function and sends the result as a message of the role `tool`. The marks around the JSON
are those of Hermes and Qwen (NousResearch, Hermes-Function-Calling; the chat template of Qwen 2.5). A model
decides itself whether it calls a function, and may write anything: a block with other JSON stays text,
and names and arguments are not compared with the schemas.
"""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from polyformer.applications.serving.replies import GrowingChoice, Reply
from polyformer.applications.serving.rows import Reason, TokenScore
from polyformer.core.errors import InputError
from polyformer.core.parsing import parse_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""The marks around a call."""

LENGTH = 2**16
"""The most characters of a call."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the function `name`. arguments: a JSON object as text."""

    name: str
    arguments: str

    def content(self) -> dict[str, Any]:
        """Return the call in OpenAI's form, with a new id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def call_of(text: str) -> Call | None:
    """Return the call that a JSON text between two marks is, or None."""
    if len(text) > LENGTH:
        return None
    try:
        value = parse_json(text, "tool_call", dict)
        arguments = value.get("arguments", {})
        if isinstance(arguments, str):  # some models write JSON within JSON
            arguments = parse_json(arguments, "arguments", dict)
    except InputError:
        return None
    if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


class CallReader:
    """Divides a growing text into the text for the user and calls. most: calls; None for any number.

    What may become a call is held back: white space, a part of the first mark, and a block without its end.
    """

    def __init__(self, most: int | None = None):
        self.most, self.held, self.calls = most, "", 0

    def read(self, piece: str) -> tuple[str, list[Call]]:
        """Return the text and the calls that are complete with the next piece."""
        self.held += piece
        text, calls = "", list[Call]()
        while (first := self.held.find(OPEN)) >= 0:
            end = self.held.find(CLOSE, first)
            if end < 0:
                break
            call = call_of(self.held[first + len(OPEN) : end])
            after = end + len(CLOSE)
            text += self.held[:after] if call is None else self.held[:first].rstrip()
            self.held = self.held[after:]
            if call is not None:
                calls.append(call)
        place = len(self.held[:first].rstrip()) if first >= 0 else sure_length(self.held)
        text, self.held = text + self.held[:place], self.held[place:]
        return text, self._counted(calls)

    def finish(self) -> str:
        """Return the rest of the text; only white space after calls is left out."""
        rest, self.held = self.held, ""
        return rest if rest.strip() or not self.calls else ""

    def _counted(self, calls: list[Call]) -> list[Call]:
        """Return the calls up to the most, and count them."""
        kept = calls if self.most is None else calls[: max(0, self.most - self.calls)]
        self.calls += len(kept)
        return kept


def sure_length(text: str) -> int:
    """Return the length of a text without an end that may become white space and a mark."""
    for size in range(min(len(text), len(OPEN) - 1), 0, -1):
        if OPEN.startswith(text[-size:]):
            return len(text[:-size].rstrip())
    return len(text.rstrip())


@dataclasses.dataclass
class ToolReply(Reply):
    """A reply of a chat with texts that may have calls. most: calls of a choice; None for any number."""

    most: int | None = None
    readers: dict[int, CallReader] = dataclasses.field(default_factory=dict)

    def chunk(
        self, index: int, text: str | None, scores: Sequence[TokenScore] = (), reason: Reason | None = None
    ) -> dict[str, Any]:
        """Return a chunk of a stream, with a delta of text, complete calls, both or none of them."""
        chunk = super().chunk(index, text, scores, reason)
        if text is None and reason is None:
            return chunk
        reader = self.readers.setdefault(index, CallReader(self.most))
        first = reader.calls
        shown, calls = reader.read(text or "")
        if reason is not None:
            shown += reader.finish()
        part = chunk["choices"][0]
        part["finish_reason"] = reason_of(reason, reader.calls)
        part["delta"] = {"content": shown} if shown else {}
        if calls:
            numbered = [{"index": first + i, **call.content()} for i, call in enumerate(calls)]
            part["delta"]["tool_calls"] = numbered
        return chunk

    def _whole_choice(self, choice: GrowingChoice) -> dict[str, Any]:
        reader = CallReader(self.most)
        text, calls = reader.read(choice.text)
        text += reader.finish()
        part = super()._whole_choice(choice)
        part["finish_reason"] = reason_of(choice.reason, len(calls))
        part["message"]["content"] = text if text or not calls else None
        if calls:
            part["message"]["tool_calls"] = [call.content() for call in calls]
        return part


def reason_of(reason: Reason | None, calls: int) -> str | None:
    """Return why a choice ended; a text that was cut keeps its reason."""
    return "tool_calls" if reason == "stop" and calls else reason


def with_objects(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a message with the arguments of its calls as objects, which templates write as JSON.

    Raises `ValueError` with `name` for calls in another form than OpenAI's.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return dict(message)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{name}: expected a list of objects as its tool_calls")
    return {**message, "tool_calls": [_with_object(call, name) for call in calls]}


def _with_object(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{name}: expected a function with a name in each of its tool_calls")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments, "arguments", dict)
        except InputError as error:
            raise ValueError(f"{name}: expected a JSON object as the arguments of a call; {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{name}: expected a JSON object as the arguments of a call")
    return {**call, "function": {**function, "arguments": arguments}}
