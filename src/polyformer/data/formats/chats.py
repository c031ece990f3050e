"""Conversations, instructions and preferences in the forms of public data sets, as messages.

    messages        {"messages": [{"role": "user", "content": "..."}, ...]}                  OpenAI
    turns           {"conversations": [{"from": "human", "value": "..."}, ...]}              ShareGPT
    instructions    {"instruction": "...", "input": "...", "output": "..."}                  Alpaca
    completions     {"prompt": "...", "completion": "..."}                                   texts or messages
    preferences     {"prompt": "...", "chosen": "...", "rejected": "..."}                    texts or messages

A row of any form becomes messages with a role and content. A column `system` becomes the first message, and
`tools`, JSON schemas of functions, stay next to the messages. An instruction and its input (in Dolly
`context`) are a single message with an empty line between them. Without a prompt, `chosen` and `rejected` are
whole conversations that end with the reply. Completions with a label true or false (KTO) are
refused, because some of them are no examples to follow.

Messages are JSON in a text column, because a table of nested values would add the keys of all rows to each.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.parsing import parse_json

Row = dict[str, Any]
Messages = list[dict[str, Any]]

CONVERSATION = "conversation"
"""The role of a conversation, for tasks: {"messages": [...], "tools": [...]} as JSON."""

PREFERENCE = ("chosen", "rejected")
"""The roles of a preference: {"messages": [...]} each as JSON, whose last message is the reply."""

CHATS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns")
REQUESTS = ("instruction", "prompt", "question", "query", "input")
REPLIES = ("output", "completion", "response", "answer", "reply")
"""Usual names of columns, in lower case."""

UNPAIRED = "completions with a label"

ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
}
"""The role of a message for the names in data sets."""

TURNS = ({"role", "content"}, {"from", "value"})


def is_chat(value: object) -> bool:
    """Return whether a value is a list of messages, or its JSON in a table."""
    if isinstance(value, str):
        return value.lstrip().startswith("[{")
    return isinstance(value, list) and any(
        isinstance(turn, dict) and any(names <= turn.keys() for names in TURNS) for turn in value
    )


def form_of(row: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """Return the form of a row, of those in the table above, and its columns; None for other rows."""
    columns = {name.strip().lower(): name for name in row}
    if {*PREFERENCE} <= columns.keys():
        pair = [columns[name] for name in PREFERENCE]
        if all(isinstance(row[name], str) or is_chat(row[name]) for name in pair):
            return "preferences", [*([columns["prompt"]] if "prompt" in columns else []), *pair]
    for name in CHATS:
        if name in columns and is_chat(row[columns[name]]):
            return ("turns" if _has_senders(row[columns[name]]) else "messages"), [columns[name]]
    request, reply = (
        next((columns[name] for name in names if name in columns), None) for names in (REQUESTS, REPLIES)
    )
    if request is None or reply is None or not (_is_said(row[request]) and _is_said(row[reply])):
        return None
    if isinstance(row.get(columns.get("label", "")), bool):
        return UNPAIRED, [request, reply]
    further = next((columns[name] for name in ("input", "context") if name in columns), None)
    if request.strip().lower() == "instruction" and further and isinstance(row[further], str):
        return "instructions", [request, further, reply]
    return "completions", [request, reply]


def chat_hint(row: Mapping[str, Any]) -> str | None:
    """Return the kind of a row of chats, instructions or preferences, and its tasks; None for other rows."""
    form, columns = form_of(row) or ("", [])
    ready = "name a chat model that learns from them with --pretrained MODEL"
    single_text = "write each as a single text in a column 'text', which trains a language model"
    if form in ("messages", "turns"):
        return f"the column {columns[0]!r} has chats; {ready}, or {single_text}"
    if form == "preferences":
        chosen, rejected = columns[-2:]
        way = (
            f"--task.kind lm --data.columns '{{text: {chosen}}}' trains a language model on the chosen texts"
        )
        other = way if isinstance(row[chosen], str) else f"of the chosen chats, {single_text}"
        return f"the columns {chosen!r} and {rejected!r} are preferences; {ready}, or {other}"
    if not form:
        return None
    request, reply = columns[0], columns[-1]
    return (
        f"the columns {request!r} and {reply!r} are requests with replies; {ready}; for an encoder-decoder "
        f"from {request} to {reply}, which reads no other column, set --task.kind translate --data.columns "
        f"'{{source: {request}, target: {reply}}}'; for a language model, {single_text}"
    )


def conversations(rows: Iterable[Row], columns: Mapping[str, str], source: str) -> Iterator[Row]:
    """Yield a row with the column of the role `CONVERSATION` for each row of chats or instructions.

    columns: the columns of roles that the user names; `messages` names the column of chats. Raises
    `InputError` for a row of another form.
    """
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        row = _with_usual_name(row, columns.get("messages"))
        form, names = form_of(row) or ("", [])
        if form not in ("messages", "turns", "instructions", "completions"):
            raise _unknown_form(where, row, "chats or instructions")
        values = [row[name] for name in names]
        if form in ("messages", "turns"):
            messages = messages_of(values[0], where, "user")
        else:
            said = "\n\n".join(filter(None, values[:-1])) if form == "instructions" else values[0]
            messages = [*messages_of(said, where, "user"), *messages_of(values[-1], where, "assistant")]
        whole: Row = {"messages": [*_system(row, where), *messages]}
        tools = row.get("tools")
        if tools:
            whole["tools"] = parse_json(tools, f"{where}: tools", list) if isinstance(tools, str) else tools
        yield {columns.get(CONVERSATION, CONVERSATION): json.dumps(whole, ensure_ascii=False)}


def preferences(rows: Iterable[Row], columns: Mapping[str, str], source: str) -> Iterator[Row]:
    """Yield a row with the columns `PREFERENCE` for each row of preferences.

    Raises `InputError` for a row of another form, and for conversations that do not end with a reply, or
    differ before it.
    """
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        row = {**row, **{role: row[name] for role, name in columns.items() if name in row}}
        form, names = form_of(row) or ("", [])
        if form != "preferences":
            raise _unknown_form(where, row, "preferences, with columns chosen and rejected")
        prompt = [*_system(row, where)]
        if len(names) == 3:
            prompt += messages_of(row[names[0]], where, "user")
        sides = [_side(prompt, messages_of(row[name], where, "assistant"), where) for name in names[-2:]]
        if sides[0][:-1] != sides[1][:-1]:
            raise InputError(
                f"{where}: chosen and rejected are conversations that differ before their last message, so "
                "that they do not answer the same prompt; leave the row out"
            )
        texts = [json.dumps({"messages": side}, ensure_ascii=False) for side in sides]
        yield {columns.get(role, role): text for role, text in zip(PREFERENCE, texts)}


def messages_of(value: object, where: str, role: str) -> Messages:
    """Return messages with a role and content; a text becomes a message of `role`."""
    if isinstance(value, str) and not is_chat(value):
        return [{"role": role, "content": value}]
    turns = parse_json(value, where, list) if isinstance(value, str) else value
    if not isinstance(turns, list):
        raise InputError(f"{where}: expected a list of messages, got {quote(value)}")
    return [_message(turn, where) for turn in turns]


def _message(turn: object, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise InputError(f"{where}: expected messages with a role and content, got {quote(turn)}")
    named = {name: value for name, value in turn.items() if value is not None}
    if "role" not in named and "from" in named:
        named = {"role": named.pop("from"), "content": named.pop("value", ""), **named}
    role = ROLES.get(str(named.get("role")).strip().lower())
    if role is None:
        known = ", ".join(ROLES)
        raise InputError(f"{where}: the role of a message is {quote(named.get('role'))}; expected {known}")
    return {**named, "role": role}


def _side(prompt: Messages, reply: Messages, where: str) -> Messages:
    """Return a whole conversation: the reply after the prompt, unless it repeats the prompt."""
    repeats = bool(reply) and reply[0]["role"] != "assistant"
    whole = reply if repeats else [*prompt, *reply]
    if len(whole) < 2 or whole[-1]["role"] != "assistant":
        raise InputError(
            f"{where}: expected a prompt and a reply of the assistant after it; add a column 'prompt'"
        )
    return whole


def _system(row: Mapping[str, Any], where: str) -> Messages:
    said = row.get("system") or row.get("system_prompt")
    return messages_of(said, where, "system") if isinstance(said, str) else []


def _with_usual_name(row: Row, column: str | None) -> Row:
    return row if column is None or column not in row else {CHATS[0]: row[column], **row}


def _has_senders(value: object) -> bool:
    return '"from"' in value if isinstance(value, str) else "from" in value[0]  # type: ignore[index]


def _is_said(value: object) -> bool:
    return isinstance(value, str) or is_chat(value)


def _unknown_form(where: str, row: Row, expected: str) -> InputError:
    return InputError(
        f"{where}: expected {expected} in one of the forms of docs/data.md, got the columns "
        f"{', '.join(map(quote, row)) or 'none'}; name the column of chats with --data.columns "
        "'{messages: NAME}'"
    )
