"""The description of a store, in STORE/store.json; it is checked before the store is used."""

import dataclasses
from pathlib import Path
from typing import Any, Self

from polyformer.applications.retrieval.windows import Reading
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import read_json, write_json
from polyformer.core.paths import refuse_links
from polyformer.data.sources.checks import data_changes

MANIFEST = "store.json"
VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Config):
    """The description of a store."""

    version: int = VERSION
    dimension: int
    dtype: str = "float16"
    model: str  # fingerprint of its weights and configuration
    tokenizer: str  # fingerprint
    key: str  # kind of the keys: "feedforward", or "hidden" of a model of transformers
    reading: Reading
    text: tuple[dict[str, Any], ...]  # the files by size and digest (`polyformer.data.sources.checks`)
    part: int = 1  # the number of this part, from 1 to `parts`
    parts: int = 1
    count: int | None = None  # entries; None until the build is finished
    block: int | None = None  # entries per checksum (`checksums`); None in older stores

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return an example of a whole store."""
        return (cls(dimension=2, model="", tokenizer="", key="hidden", reading=Reading(), text=()),)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the manifest of the store in `folder`; raises `InputError` if it is missing or damaged."""
        if not (folder / MANIFEST).is_file():
            raise InputError(
                f"{folder}: not a datastore (it has no {MANIFEST}); build a store with "
                "polyformer datastore build"
            )
        refuse_links(folder)
        return cls.parsed(read_json(folder / MANIFEST, dict), folder / MANIFEST)

    @classmethod
    def parsed(cls, tree: dict[str, Any], place: object) -> Self:
        """Return the manifest from plain data that was read at `place`."""
        version = tree.get("version")
        if version != VERSION:
            raise InputError(f"{place}: expected a store of version {VERSION}, got {version}; build it again")
        try:
            manifest = cls.from_dict(tree)
        except InputError as error:
            raise InputError(f"{place}: damaged ({error}); build the store again") from error
        block = 1 if manifest.block is None else manifest.block
        numbers = manifest.dimension, (manifest.count or 0) + 1, block
        if manifest.dtype != "float16" or min(numbers) < 1:
            raise InputError(f"{place}: damaged; build the store again")
        return manifest

    def write(self, folder: Path) -> None:
        """Write the manifest to STORE/store.json."""
        write_json(folder / MANIFEST, self.to_dict())

    def check_same(self, other: Self, place: object) -> None:
        """Raise `InputError` if the build at `place`, with this manifest, cannot be resumed with `other`."""
        changes = data_changes({"text": list(self.text)}, {"text": list(other.text)})
        names = "model", "tokenizer", "key", "dimension", "reading", "part", "parts"
        differ = [name for name in names if getattr(self, name) != getattr(other, name)]
        if changes or differ or len(self.text) != len(other.text):
            what = "; ".join(changes) or f"another {', '.join(differ) or 'text'}"
            raise InputError(
                f"{place}: started with other input ({what}); use the same input, or choose another --out"
            )

    def check_reader(self, model: str, tokenizer: str, place: object) -> None:
        """Raise `InputError` unless the store was built with this model and tokenizer (fingerprints)."""
        for name, own, other in (("model", self.model, model), ("tokenizer", self.tokenizer, tokenizer)):
            if own != other:
                raise InputError(
                    f"{place}: built with another {name} ({own[:12]}, not {other[:12]}); take that one, or "
                    "build a store for this one by polyformer datastore build"
                )
