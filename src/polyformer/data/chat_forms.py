"""Recognition of chats, instructions and preferences, which have no task, and the use that they have today.

{"messages": [{"role": "user", "content": "..."}, ...]}         chats
{"conversations": [{"from": "human", "value": "..."}, ...]}     chats, as in ShareGPT
{"instruction": "...", "input": "...", "output": "..."}         instructions, as in Alpaca
{"prompt": "...", "completion": "..."}                          instructions
{"prompt": "...", "chosen": "...", "rejected": "..."}           preferences
"""

from typing import Any

Row = dict[str, Any]

_CHATS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns")
_TURNS = ({"role", "content"}, {"from", "value"})
_REQUESTS = ("instruction", "prompt", "question", "query", "input")
_REPLIES = ("output", "completion", "response", "answer", "reply")
_ONE_TEXT = "write each as a single text in a column 'text', which trains a language model"


def chat_hint(row: Row) -> str | None:
    """Return what a row of chats, instructions or preferences is and can train; None for other rows."""
    columns = {name.strip().lower(): name for name in row}
    for name in _CHATS:
        if name in columns and _is_chat(row[columns[name]]):
            return f"the column {columns[name]!r} has chats, and no task trains on chats; {_ONE_TEXT}"
    if {"chosen", "rejected"} <= columns.keys():
        chosen = columns["chosen"]
        way = (
            f"--task.kind lm --data.columns '{{text: {chosen}}}' trains a language model on the chosen texts"
        )
        return (
            f"the columns {chosen!r} and {columns['rejected']!r} are preferences, and no task trains on "
            f"preferences; {way if isinstance(row[chosen], str) else f'of the chosen chats, {_ONE_TEXT}'}"
        )
    request, reply = (
        next((columns[name] for name in names if name in columns), None) for names in (_REQUESTS, _REPLIES)
    )
    if (
        request is None
        or reply is None
        or not (isinstance(row[request], str) and isinstance(row[reply], str))
    ):
        return None
    return (
        f"the columns {request!r} and {reply!r} are requests with replies; for an encoder-decoder from "
        f"{request} to {reply}, which reads no other column, set --task.kind translate --data.columns "
        f"'{{source: {request}, target: {reply}}}'; for a language model, {_ONE_TEXT}"
    )


def _is_chat(value: object) -> bool:
    """Return whether a value is a list of turns, or its text in a table."""
    if isinstance(value, str):
        return value.lstrip().startswith("[{")
    return isinstance(value, list) and any(
        isinstance(turn, dict) and any(names <= turn.keys() for names in _TURNS) for turn in value
    )
