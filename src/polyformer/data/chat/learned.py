"""Which tokens of a conversation a model learns to write: those of the assistant.

Where a template marks them by `{% generation %}`, its marks decide. Elsewhere the text of message i, of the
assistant, is what the conversation grows by:

    before_i = render(messages[:i], add_generation_prompt=True)
    after_i = render(messages[:i + 1])
    span_i = [len(before_i), len(after_i))

So the end of the turn belongs to the message and the beginning of the turn, which the prompt of a generation
contains, does not. This needs before_i to be the beginning of after_i, and after_i that of the whole text. A
template that changes earlier messages when the conversation continues, as those that drop earlier reasoning,
is refused.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.data.chat.template import ChatTemplate, Message, RenderedChat
from polyformer.data.tokenizers.tokenizer import Tokenizer

ASSISTANT = "assistant"

TAG = re.compile(r"\{%[-+]?\s*generation\b")
"""The tag by which a template marks what the assistant writes."""


def learned_spans(
    chat: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    last_only: bool = False,
) -> RenderedChat:
    """Return the text of a conversation with the spans of the assistant's messages.

    last_only: only the span of the last message, which is the assistant's. Raises `InputError` for a template
    that refuses the conversation or changes its beginning when it continues, and without `{% generation %}`
    for a conversation that the assistant begins.
    """
    if TAG.search(chat.source(tools)) and not last_only:
        return chat.render_spans(messages, tools)
    whole = chat.render_spans(messages, tools)
    if last_only:
        start = len(_prompt(chat, messages, len(messages) - 1, tools, whole.text))
        marked = [span for span in whole.spans if span[1] > start]
        return RenderedChat(whole.text, tuple(marked) or ((start, len(whole.text)),))
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message.get("role") == ASSISTANT:
            after = whole.text
            if number + 1 < len(messages):
                after = chat.render(messages[: number + 1], tools=tools)
                _check_beginning(chat, after, whole.text, tools)
            spans.append((len(_prompt(chat, messages, number, tools, after)), len(after)))
    return RenderedChat(whole.text, tuple(spans))


def learned_tokens(
    tokenizer: Tokenizer, conversation: Mapping[str, Any], *, last_only: bool = False
) -> tuple[list[int], list[bool]]:
    """Return the ids of {"messages": [...], "tools": [...]}, and which of them are learned."""
    assert tokenizer.chat is not None
    messages, tools = conversation["messages"], conversation.get("tools")
    return tokenizer.encode_chat(learned_spans(tokenizer.chat, messages, tools, last_only=last_only))


def _prompt(chat: ChatTemplate, messages: Sequence[Message], number: int, tools: Any, after: str) -> str:
    """Return the text before message `number`, which is the beginning of the text `after` it."""
    if number == 0:
        raise InputError(
            "messages: the assistant's message is the first, so that nothing precedes it; begin with a "
            "message of the user, or use a chat template that marks the assistant by {% generation %}"
        )
    before = chat.render(messages[:number], tools=tools, add_generation_prompt=True)
    _check_beginning(chat, before, after, tools)
    return before


def _check_beginning(chat: ChatTemplate, shorter: str, longer: str, tools: Any) -> None:
    """Raise `InputError` that names the template if a text is not the beginning of the continued text."""
    if longer.startswith(shorter):
        return
    pairs = enumerate(zip(shorter, longer))
    place = next((place for place, (a, b) in pairs if a != b), min(len(shorter), len(longer)))
    name = next(name for name, source in chat.sources.items() if source == chat.source(tools))
    raise InputError(
        f"chat template {quote(name)}: it changes the beginning of a conversation that continues, at "
        f"{quote(shorter[max(0, place - 20) : place + 20])}, so that the assistant's text cannot be told "
        "from the rest; use a template that marks it by {% generation %}, with --task.template FILE"
    )
