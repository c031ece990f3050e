"""Checkpoints of others: names on the Hugging Face hub, and loading through transformers.

A name is `owner/name` or `owner/name@revision`. transformers is called in a single function that never runs
code of a checkpoint.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote, reason_of
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
