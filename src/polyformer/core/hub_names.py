"""Names on the Hugging Face hub, `owner/name` or `owner/name@revision`, to directories on this machine."""

import re
from pathlib import Path

from polyformer.core.errors import InputError, quote

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
