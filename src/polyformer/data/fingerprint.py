"""Fingerprints of the data of a run, so that a resumed run detects whether the data have changed.

They contain the size of every file and the SHA-256 of its bytes. Of a file larger than `WHOLE` bytes, only
evenly spaced blocks are hashed, because reading all of it might take longer than the remaining training.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyformer.core.files import open_file
from polyformer.data.images import IMAGE, labels_file
from polyformer.data.library_text import default_documents
from polyformer.data.origins import source_files
from polyformer.data.sources import DataConfig

WHOLE = 1 << 30
BLOCKS, BLOCK = 256, 1 << 20

Fingerprint = dict[str, list[dict[str, Any]]]
"""By role (path, validation, test): file, bytes and sha256 of each file, in order."""


def fingerprint(config: DataConfig, needs: Sequence[str]) -> Fingerprint:
    """Return the fingerprint of the data in `config`, read for `needs` (see `polyformer.data.load`).

    Data sets of the hub and the default images have no fingerprint.
    """
    sources = {"path": config.path, "validation": config.validation, "test": config.test}
    files_of = {role: source_files(source) for role, source in sources.items() if source is not None}
    if "label" in needs:
        for files in files_of.values():
            files += filter(None, map(labels_file, list(files)))
    prints = {role: [of_file(file) for file in files] for role, files in files_of.items()}
    return {"path": [_of_default()], **prints} if config.path is None and IMAGE not in needs else prints


def data_changes(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return descriptions of the changes from `before` to `now`; paths and names of files are ignored."""
    changes: list[str] = []
    for role, files in before.items():
        others = now.get(role, [])
        if files and others and len(files) != len(others):
            changes.append(f"{role}: {len(files)} files, now {len(others)}")
        for old, new in zip(files, others):
            if old["bytes"] != new["bytes"]:
                changes.append(f"{new['file']}: {old['bytes']:,} bytes, now {new['bytes']:,}")
            elif old["sha256"] != new["sha256"]:
                changes.append(f"{new['file']}: other content, of the same size")
    return changes


def of_file(path: Path) -> dict[str, Any]:
    """Return the name, size and digest of a file: see the module."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with open_file(path) as file:
        if size <= WHOLE:
            digest = hashlib.file_digest(file, "sha256")
        else:
            for number in range(BLOCKS):
                file.seek(number * (size - BLOCK) // (BLOCKS - 1))
                digest.update(file.read(BLOCK))
    return {"file": str(path), "bytes": size, "sha256": digest.hexdigest()}


def _of_default() -> dict[str, Any]:
    text = "\0".join(default_documents()).encode()
    return {"file": "the default text", "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
