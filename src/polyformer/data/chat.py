"""Conversations as text: `ChatTemplate`, by which a chat model reads them, and the files of templates.

    template = load_tokenizer("smollm2").chat
    text = template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)

The text is the same as from transformers' `apply_chat_template`. Rendering runs in a separate process with
limits on time, memory and output (`chat_sandbox`), which stays for the next rendering and ends with this
process. `Tokenizer.encode_chat` converts the text to tokens.

Files are read and written as transformers does:

    chat_template.jinja                        the default template; has priority
    additional_chat_templates/NAME.jinja       others by name
    tokenizer_config.json, "chat_template"     a template, or a list of {"name": ..., "template": ...}
    a GGUF file, tokenizer.chat_template       the default; tokenizer.chat_template.NAME are others

Written are the first two.
"""

import atexit
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import atomic_write, read_bounded
from polyformer.core.foreign_checkpoints import Gguf
from polyformer.core.paths import leaves_folder, refuse_links
from polyformer.data.chat_sandbox import LENGTH

Message = Mapping[str, Any]
"""A turn: its "role" and "content", and what else the template reads."""

SECONDS, MEMORY, CHARACTERS = 1.0, 2**30, 2**24
"""Limits of a rendering: processor time, bytes of addresses, characters of the text."""

PATIENCE = 30
"""The time by the clock after which the process is ended, as a multiple of SECONDS: a busy machine may give
it little of a processor."""

REASONING = "reasoning_content", "thinking", "reasoning"
"""Names of a message's reasoning, the usual one first."""

MARK = "END_OF_THE_UNFINISHED_MESSAGE "
"""Marks where a continued message ends. The space shows whether the template trims messages."""


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    """A conversation as text. spans: characters (first, end) inside of `{% generation %}` blocks, which a
    model learns to write; empty for templates without such blocks."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()


class Sandbox:
    """The process that renders templates; it starts with the first rendering, and again after an end."""

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY, characters: int = CHARACTERS):
        self.limits = seconds, memory, characters
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0  # the process that started it; the child of a fork needs another

    def render(self, source: str, variables: Mapping[str, Any]) -> RenderedChat:
        """Return the text of a template; raise `InputError` for its errors and at a limit."""
        try:
            request = json.dumps({"source": source, "variables": variables}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"messages: expected texts, numbers, lists and mappings as in JSON, got {error}"
            ) from error
        with self.lock:
            reply = self._reply(request)
        if "error" in reply:
            raise InputError(f"chat template: {reply['error']}")
        return RenderedChat(reply["text"], tuple((first, end) for first, end in reply["spans"]))

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is None or self.owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def _reply(self, request: bytes) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self.limits[0] * PATIENCE, process.kill)
        timer.start()
        try:
            process.stdin.write(len(request).to_bytes(LENGTH, "little") + request)
            process.stdin.flush()
            head = process.stdout.read(LENGTH)
            size = int.from_bytes(head, "little")
            content = process.stdout.read(size) if len(head) == LENGTH else b""
        except BrokenPipeError:
            size, content = 1, b""
        except BaseException:  # half of a reply would be taken for the next
            self.close()
            raise
        finally:
            timer.cancel()
        if len(content) == size and content:
            return json.loads(content)
        self.close()
        seconds, memory, _ = self.limits
        return {
            "error": f"it reached the limit of {seconds:g} s and {memory >> 20} MiB; use another template"
        }

    def _running(self) -> "subprocess.Popen[bytes]":
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            self.close()
            file = Path(__file__).with_name("chat_sandbox.py")
            words = [sys.executable, "-P", str(file), *map(str, self.limits)]
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self.owner = os.getpid()
        return self.process


SANDBOX = Sandbox()
atexit.register(SANDBOX.close)


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The templates of a checkpoint by name, mostly only a "default", and its special tokens.

    tokens: variables of the template, such as `bos_token`. A template "tool_use" is for conversations with
    tools, if there is one.
    """

    sources: Mapping[str, str]
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def source(self, tools: object = None, name: str | None = None) -> str:
        """Return the template for a conversation; raise `InputError` for an unknown name."""
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise unknown("chat template", name, self.sources)
        return self.sources[name]

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the text of a conversation; `options` as in `render_spans`."""
        return self.render_spans(messages, **options).text

    def render_spans(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        name: str | None = None,
        **variables: Any,
    ) -> RenderedChat:
        """Return the text of a conversation with the spans of `{% generation %}` blocks.

        Args:
            messages: the turns; a value None is as a missing one.
            tools: JSON schemas of functions, for templates that describe them to the model.
            documents: texts to answer from, for templates that have them.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: leave the last message open for the model to continue; without spans.
            name: of the template, if the checkpoint has several.
            variables: what else the template reads, such as `enable_thinking`.

        Raises:
            InputError: the template refuses the conversation or reaches a limit; both ways of ending at once;
                a last message without text, or that the template changes.
        """
        if add_generation_prompt and continue_final_message:
            raise InputError(
                "add_generation_prompt and continue_final_message: a text ends with a new turn or with an "
                "unfinished one; leave out one of them"
            )
        turns = [checked_message(message) for message in messages]
        if not turns:
            raise InputError("messages: expected a message or more, got none")
        final = open_end(turns) if continue_final_message else ""
        values = {**self.tokens, **variables, "messages": turns, "tools": tools, "documents": documents}
        values["add_generation_prompt"] = add_generation_prompt
        rendered = SANDBOX.render(self.source(tools, name), values)
        return RenderedChat(cut_at_mark(rendered.text, final)) if continue_final_message else rendered


def checked_message(message: object) -> dict[str, Any]:
    """Return a copy of a message without its empty values, and with its reasoning under the usual names."""
    if not isinstance(message, Mapping):
        raise InputError(f"messages: expected mappings with a role and content, got {quote(message)}")
    turn = {name: value for name, value in message.items() if value is not None}
    reasoning = next((turn[name] for name in REASONING if name in turn), None)
    return turn if reasoning is None else {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def open_end(turns: list[dict[str, Any]]) -> str:
    """Put `MARK` behind the text of the last of the turns, in place, and return this text."""
    last = turns[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + MARK
        return content
    if isinstance(content, list | tuple):
        parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
        last["content"] = parts
        for part in reversed(parts):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                final = part["text"]
                part["text"] = final + MARK
                return final
    raise InputError(
        f"continue_final_message: expected a text as the content of the last message, got {quote(content)}"
    )


def cut_at_mark(text: str, final: str) -> str:
    """Return a rendered text up to the end of its last message `final`, which `MARK` follows."""
    place = text.rfind(MARK.strip())
    if place < 0 or final.strip() not in text:
        raise InputError(
            "continue_final_message: the chat template does not show the last message as it is; use "
            "add_generation_prompt"
        )
    shorter = text[:place]
    return shorter if text[place : place + len(MARK)] == MARK else shorter.rstrip()


DEFAULT, OTHERS, ENDING = "chat_template.jinja", "additional_chat_templates", ".jinja"

SOURCE_BYTES = 2**20
"""The most bytes of a template; long ones with tools have 20 KB."""

NAME = re.compile(r"[\w-]{1,64}")
"""A template's name is the name of a file."""

GGUF_KEY = "tokenizer.chat_template"


def of_folder(
    folder: Path, settings: Mapping[str, Any], tokens: Mapping[str, str | None]
) -> ChatTemplate | None:
    """Return the templates of a folder; None without any.

    settings: of its tokenizer_config.json. tokens: the special token of each role. Raises `InputError` for a
    file that is too large or not UTF-8, and for settings of another form.
    """
    sources = {**_in_settings(folder, settings.get("chat_template")), **_in_files(folder)}
    return _checked(folder, sources, tokens)


def of_gguf(file: Gguf, tokens: Mapping[str, str | None]) -> ChatTemplate | None:
    """Return the templates of a GGUF file; None without any."""
    sources = {}
    for key, value in file.metadata.items():
        if key == GGUF_KEY or (key.startswith(f"{GGUF_KEY}.") and isinstance(value, str)):
            sources[key[len(GGUF_KEY) + 1 :] or "default"] = file.value(key, str)
    return _checked(file.path, sources, tokens)


def write_templates(chat: ChatTemplate | None, folder: Path) -> None:
    """Write the templates into a folder, and remove the templates of an earlier tokenizer in it."""
    sources = {} if chat is None else dict(chat.sources)
    default = sources.pop("default", None)
    if default is None:
        (folder / DEFAULT).unlink(missing_ok=True)
    else:
        atomic_write(folder / DEFAULT, default.encode())
    others = folder / OTHERS
    if others.is_dir() and not others.is_symlink():
        for path in others.glob(f"*{ENDING}"):
            if path.stem not in sources:
                path.unlink()
    for name, source in sources.items():
        atomic_write(others / f"{name}{ENDING}", source.encode())


def _in_settings(folder: Path, value: object) -> dict[str, str]:
    where = f"{folder / 'tokenizer_config.json'}: chat_template"
    if value is None or isinstance(value, str):
        return {} if value is None else {"default": value}
    if not isinstance(value, list):
        raise InputError(f"{where}: expected a text, or a list of names with texts, got {quote(value)}")
    sources = {}
    for item in value:
        name, source = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise InputError(f"{where}: expected a name and a template, got {quote(item)}")
        sources[name] = source
    return sources


def _in_files(folder: Path) -> dict[str, str]:
    paths = {"default": folder / DEFAULT} if (folder / DEFAULT).is_file() else {}
    if (folder / OTHERS).is_dir():
        refuse_links(folder / OTHERS)
        if leaves_folder(folder, folder / OTHERS):
            raise InputError(
                f"{folder / OTHERS} is a link to a folder outside of {folder}; put the folder itself there"
            )
        paths |= {path.stem: path for path in sorted((folder / OTHERS).glob(f"*{ENDING}"))}
    sources = {}
    for name, path in paths.items():
        try:
            sources[name] = read_bounded(path, SOURCE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: expected UTF-8, got other bytes ({error})") from error
    return sources


def _checked(
    place: Path, sources: Mapping[str, str], tokens: Mapping[str, str | None]
) -> ChatTemplate | None:
    for name, source in sources.items():
        if not NAME.fullmatch(name):
            raise InputError(f"{place}: the chat template {quote(name)} has no name of letters and digits")
        if len(source) > SOURCE_BYTES:
            raise InputError(f"{place}: the chat template {quote(name)} has more than {SOURCE_BYTES} bytes")
    if not sources:
        return None
    return ChatTemplate(sources, {f"{role}_token": token for role, token in tokens.items() if token})
