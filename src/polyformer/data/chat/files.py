"""The files of chat templates, as transformers reads and writes them.

    chat_template.jinja                        the default template; has priority
    additional_chat_templates/NAME.jinja       others by name
    tokenizer_config.json, "chat_template"     a template, or a list of {"name": ..., "template": ...}
    a GGUF file, tokenizer.chat_template       the default; tokenizer.chat_template.NAME are others

Written are the first two.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.files import atomic_write, read_bounded
from polyformer.core.foreign_checkpoints import Gguf
from polyformer.core.paths import leaves_folder, refuse_links
from polyformer.data.chat.template import ChatTemplate

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
