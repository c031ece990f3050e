"""Checkpoints of others: names on the Hugging Face hub, loading through transformers, and GGUF files.

A name on the hub is `owner/name` or `owner/name@revision`. transformers is called in a single function that
never runs code of a checkpoint.

A GGUF file has one model: named values (a description of the model and its tokenizer), then the name, shape,
number type and offset of each tensor, then the tensors, little-endian (docs/gguf.md in
github.com/ggml-org/ggml). Only the part before the tensors is read here; every length in it is checked
against the rest of the file before it is used.
"""

import contextlib
import math
import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polyformer.core.errors import InputError, quote, reason_of
from polyformer.core.files import open_file, reading
from polyformer.core.imports import needs_extra
from polyformer.core.paths import refuse_links

FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
"""The files to download: no pickles and no code."""

_NAME = re.compile(r"(?:[\w.-]{1,96}/)?[\w.-]{1,96}")
_REVISION = re.compile(r"\w[\w./-]{0,99}")


def fetched(name: str, revision: str | None = None) -> Path:
    """Return the directory of `name` at `revision`: a commit, a tag or a branch, by default the newest.

    `name@revision` gives both. Downloaded files are not downloaded again.
    Raises `InputError` for an invalid name, and for a name that the hub cannot provide.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, at, pinned = name.partition("@")
    if at and revision is not None:
        raise InputError(f"revision: {quote(name)} has one already, {quote(pinned)}; leave one of them out")
    revision = pinned if at else revision
    if not _NAME.fullmatch(name):
        raise InputError(f"{quote(name)}: no such directory, and no name on the hub: expected owner/name")
    if revision is not None and not _REVISION.fullmatch(revision):
        raise InputError(f"revision: expected a commit, a tag or a branch, got {quote(revision)}")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = "" if revision is None else f" at {revision}"
        reason = str(error).partition("\n")[0]
        raise InputError(f"{name}{at}: no such directory, and the hub does not give it ({reason})") from error


def check_no_revision(source: object, revision: str | None) -> None:
    """Raise `InputError` for a revision of a local model."""
    if revision is not None:
        raise InputError(f"revision: {source} is on this machine and has none; leave it out")


ADAPTER = "adapter_config.json"


def load_by_transformers(kind: str, name: str | Path, **options: Any) -> Any:
    """Return an object of transformers' class `kind` loaded from `name`, a folder or a name on the hub.

    kind: "AutoModel", "AutoTokenizer", ... options: arguments of its `from_pretrained`. Raises `InputError`
    for names that transformers cannot load, and for checkpoints that would run their own code: Python files,
    kernels of the hub, pickled weights, and an adapter that names its model.
    """
    refuse_links(name)
    with needs_extra("hub", f"{name}: needs transformers to be read"):
        import transformers
    safe: dict[str, Any] = {**options, "trust_remote_code": False}
    try:
        with _only_errors_logged():
            if kind.startswith("AutoModel"):
                safe |= {"config": _config(transformers, name, options), "use_safetensors": True}
            return getattr(transformers, kind).from_pretrained(name, **safe)
    except InputError:
        raise
    except Exception as error:  # any error of transformers' classes and file readers
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{name}: needs Python code of its own, which polyformer never runs; choose a checkpoint "
                "that transformers reads without trust_remote_code"
            ) from error
        raise InputError(f"{name}: transformers cannot read it by {kind}: {reason_of(error)}") from error


@contextlib.contextmanager
def _only_errors_logged() -> Iterator[None]:
    """Suppress transformers' progress bars, and its messages except errors, within the context."""
    from transformers.utils import logging

    progress, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if progress:
            logging.enable_progress_bar()


def _config(transformers: Any, name: str | Path, options: dict[str, Any]) -> Any:
    """Return the configuration of a model that loads neither a kernel nor another model."""
    if os.path.isfile(os.path.join(name, ADAPTER)):
        raise InputError(
            f"{name}: an adapter; merge it into its model (peft's merge_and_unload) and save that"
        )
    where = {key: options[key] for key in ("local_files_only",) if key in options}
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **where)
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        for setting in ("_attn_implementation", "_experts_implementation"):
            kernel = getattr(part, setting, None)
            if isinstance(kernel, str) and "/" in kernel:
                raise InputError(
                    f"{name}: its config.json asks for the kernel {quote(kernel)} of the hub, which is code; "
                    f"remove {setting.removeprefix('_')} from it"
                )
    return config


SUFFIX = ".gguf"
WEIGHTS = "*.safetensors", "*.bin"
"""A folder with files of these names is not searched for GGUF files."""

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of values that are a single number, with their `struct` codes."""

DIMENSIONS = 4
"""The most dimensions of a tensor."""


class TensorPlace(NamedTuple):
    """shape: as in torch, rows first. kind: the code of the number type. offset: in the file, in bytes."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Gguf:
    """The part before the tensors of the file `path`, which has `size` bytes."""

    path: Path
    size: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]

    @property
    def architecture(self) -> str:
        """The file's name of the model architecture."""
        return self.value("general.architecture", str)

    def value(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a value of type `kind`; `InputError` for another type, or no value and no `default`."""
        value = self.metadata.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and kind is float:
            return float(value)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if wrong or (kind is float and not math.isfinite(value)):
            raise InputError(
                f"{self.path}: {name} is {quote(value)}, expected {kind.__name__}; get another copy of it"
            )
        return value


def gguf_file(path: str | Path) -> Path | None:
    """Return the GGUF file `path`, or the GGUF file in the folder `path`; None if there is none.

    A folder with weights in another format does not count. Raises `InputError` for several files in a folder.
    """
    path = Path(path)
    if path.is_file():
        return path if path.suffix.lower() == SUFFIX else None
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    if not files or any(next(path.glob(pattern), None) for pattern in WEIGHTS):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise InputError(f"{path}: it has {len(files)} GGUF files ({names}); name the one to read")
    return files[0]


def read_gguf(path: Path) -> Gguf:
    """Return the part before a file's tensors; `InputError` if it is damaged or of another version."""
    with reading(path), open_file(path) as file:
        size = path.stat().st_size
        head = file.read(24)
        if head[:4] != MAGIC:
            raise InputError(f"{path}: not a GGUF file: it does not begin with 'GGUF'")
        if len(head) < 24:
            raise _truncated(path)
        (version,) = struct.unpack_from("<I", head, 4)
        if version not in VERSIONS:
            way = "convert the model again by a current llama.cpp, little-endian"
            raise InputError(f"{path}: GGUF version {version}, and only 2 and 3 are supported; {way}")
        tensors, values = struct.unpack_from("<QQ", head, 8)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            cursor = _Cursor(path, content, 24)
            metadata = {cursor.string(): cursor.value(cursor.number("I")) for _ in cursor.times(values)}
            listed = {cursor.string(): cursor.tensor() for _ in cursor.times(tensors)}
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or align < 1:
        raise InputError(f"{path}: general.alignment is {quote(align)}, expected an integer from 1")
    start = -(-cursor.at // align) * align
    places = {name: place._replace(offset=start + place.offset) for name, place in listed.items()}
    return Gguf(path, size, metadata, places)


@dataclass
class _Cursor:
    """A reader that starts at `at`."""

    path: Path
    content: mmap.mmap
    at: int

    def times(self, count: int) -> range:
        """Return a range of `count` steps if the rest of the file has at least a byte for each."""
        if count > len(self.content) - self.at:
            raise _truncated(self.path)
        return range(count)

    def bytes(self, count: int) -> bytes:
        """Return the next bytes."""
        self.times(count)
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, code: str) -> Any:
        """Return the next number with this `struct` code."""
        return struct.unpack("<" + code, self.bytes(struct.calcsize(code)))[0]

    def string(self) -> str:
        """Return the next text."""
        try:
            return self.bytes(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path}: damaged: a name that is no text ({error}); get another copy of it"
            ) from error

    def value(self, kind: int, nested: bool = False) -> Any:
        """Return the next value: a number, a text or, unless it is nested, a list."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY and not nested:
            kind, count = self.number("I"), self.number("Q")
            if kind not in SCALARS:
                return [self.value(kind, nested=True) for _ in self.times(count)]
            code = f"{count}{SCALARS[kind]}"
            self.times(count)
            return list(struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code))))
        if kind not in SCALARS:
            raise InputError(
                f"{self.path}: damaged: a value of the unknown kind {kind}; get another copy of it"
            )
        return self.number(SCALARS[kind])

    def tensor(self) -> TensorPlace:
        """Return the shape, number type and offset of the next tensor, counted from the first tensor."""
        dimensions = self.number("I")
        if dimensions > DIMENSIONS:
            raise InputError(
                f"{self.path}: damaged: a tensor of {dimensions} dimensions; get another copy of it"
            )
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return TensorPlace(shape[::-1], self.number("I"), self.number("Q"))


def _truncated(path: Path) -> InputError:
    return InputError(f"{path}: truncated: the file is shorter than its header states; get another copy")
