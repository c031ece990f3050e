"""`Conversation`: a chat model and the messages so far; a turn computes only its new tokens.

    conversation = polyformer.load("smollm2.gguf").conversation(max_new_tokens=200)
    conversation.reply("What is the capital of France?", print)

The prompt of a turn is the whole conversation as the model's template shows it. Its beginning is what the
model has read and generated before, so that the state of the last turn is kept (`KeptText`):

    text of turn n:      ...<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    the model adds:      Hello.<|im_end|>
    text of turn n + 1:  both, and then \\n<|im_start|>user\\n...

The generated tokens stay as they are: a tokenizer may split the same reply in another way. If the template
changes what was said, as some drop earlier reasoning, tokens are compared instead, and the model reads again
from the first difference on.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.files import write_output
from polyformer.data import Tokenizer
from polyformer.data.chat import ChatTemplate, Message
from polyformer.models.generation import ContinuedText, GenerationConfig, TextStreamer
from polyformer.models.generation.kept_text import KeptText

PROBE = "x"
"""A reply by which the end of a turn is found."""


def template_of(tokenizer: Tokenizer, name: object) -> ChatTemplate:
    """Return the chat template of a model's tokenizer; raise `InputError` with its name without any."""
    if tokenizer.chat is None:
        raise InputError(
            f"{name}: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "choose a checkpoint that was tuned for conversations, or continue texts with polyformer generate"
        )
    return tokenizer.chat


def turn_end(chat: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the special token that the template writes after a reply; None without any."""
    messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    try:
        ids = tokenizer.encode_chat(chat.render(messages))[0]
        opened = tokenizer.encode_chat(chat.render(messages, continue_final_message=True))[0]
    except InputError:  # a template that needs more of a conversation
        return None
    after = ids[len(opened)] if ids[: len(opened)] == opened and len(ids) > len(opened) else None
    return after if after in tokenizer.special_ids else None


def ending_turns(
    config: GenerationConfig, chat: ChatTemplate, tokenizer: Tokenizer, own: int | None
) -> GenerationConfig:
    """Return settings by which a reply ends with the turn, also where a checkpoint's end token is another.

    own: the end token of the model's configuration.
    """
    eos = config.special.eos
    eos = (() if own is None else (own,)) if eos is None else eos
    end = turn_end(chat, tokenizer)
    if end is None or end in eos:
        return config
    return dataclasses.replace(config, special=dataclasses.replace(config.special, eos=(*eos, end)))


class Conversation:
    """The messages of a conversation with `model`, and the model's state after them.

    Args:
        model: a decoder with a language-model head, in evaluation mode.
        tokenizer: with a chat template.
        config: of generation, by `ending_turns`.
        system: the first message, if any.
        variables: further options of `ChatTemplate.render`, such as `tools`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        config: GenerationConfig,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ):
        self.chat = template_of(tokenizer, "model")
        self.tokenizer, self.config, self.variables = tokenizer, config, dict(variables or {})
        self.text = KeptText(model)
        self.messages: list[dict[str, Any]] = []
        # The text that was read and generated, with its tokens: with the end of the turn, and without it.
        self.known: list[tuple[str, list[int]]] = []
        self.set_system(system)

    def set_system(self, system: str | None) -> None:
        """Replace the system message, or remove it."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = others if system is None else [{"role": "system", "content": system}, *others]

    def reset(self) -> None:
        """Forget all messages except the system's."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.known = []
        self.text.reset()

    def reply(self, content: str, write: Callable[[str], object] | None = None) -> str:
        """Return the model's reply to a user's message; both become part of the conversation.

        write: receives the pieces of the reply as they are generated. An interruption (Ctrl-C) ends the
        reply, which stays in the conversation as far as it was generated. Raises `InputError` for a message
        that the template refuses or the model cannot read; it is not part of the conversation then.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        rendered = self.chat.render(messages, add_generation_prompt=True, **self.variables)
        ids = self._ids(rendered)
        decode, pieces = self.tokenizer.decode, []

        def show(piece: str) -> None:
            pieces.append(piece)
            if write is not None:
                write(piece)

        streamer = TextStreamer(decode, self.config.stop, show)
        try:
            self.text.generate(ids, self.config, streamer, decode)
        except KeyboardInterrupt:
            if not streamer.tokens:
                raise
        streamer.finish()
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        self._remember(rendered, ids, streamer.tokens)
        return "".join(pieces)

    def save(self, file: str | Path) -> None:
        """Write the messages as lines of JSON, each with a role and content."""
        lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in self.messages]
        write_output(file, "".join(lines).encode())

    def _ids(self, rendered: str) -> list[int]:
        """Return the tokens of a text; the tokens of a known beginning stay."""
        for text, ids in self.known:
            if rendered.startswith(text):
                return ids + self.tokenizer.encode_chat(rendered[len(text) :])[0]
        return self.tokenizer.encode_chat(rendered)[0]

    def _remember(self, rendered: str, ids: list[int], tokens: list[int]) -> None:
        """Record the text of a prompt and of the tokens that were generated after it."""
        continued = ContinuedText(functools.partial(self.tokenizer.decode, keep_special=True), ids)
        lengths = [len(tokens)]
        if tokens and tokens[-1] in self.tokenizer.special_ids:
            lengths.append(len(tokens) - 1)
        self.known = [(rendered + continued(tokens[:size]), ids + tokens[:size]) for size in lengths]


def conversations_of(messages: Any) -> tuple[list[list[Message]], bool]:
    """Return conversations, each a list of messages, and whether there is a single one.

    Raises `InputError` for anything but a list of messages or a list of such lists.
    """
    if isinstance(messages, Sequence) and not isinstance(messages, str) and messages:
        if all(isinstance(message, Mapping) for message in messages):
            return [list(messages)], True
        if all(isinstance(chat, Sequence) and not isinstance(chat, str) for chat in messages):
            return [list(chat) for chat in messages], False
    raise InputError(
        "messages: expected a list of messages, such as [{'role': 'user', 'content': 'Hi'}], or a list of "
        f"such conversations, got {quote(messages)}"
    )
