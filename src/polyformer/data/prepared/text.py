"""Prepared text as the rows of a run: a folder, or several with weights.

A mixture is a YAML file of folders, relative to the file or absolute, and their weights: proportional shares
of the rows that training reads.

    books: 0.7
    ../web: 0.3
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_bounded
from polyformer.core.limits import YAML_BYTES
from polyformer.core.parsing import parse_yaml
from polyformer.data.prepared.folder import PreparedFolder, PreparedSplit
from polyformer.data.prepared.manifest import MANIFEST, is_prepared
from polyformer.data.tokenizer import Tokenizer, TokenizerConfig
from polyformer.data.tokenizer_loading import load_tokenizer

MIXTURES = (".yaml", ".yml")


class PreparedText:
    """The documents of the same split of folders, drawn by `weights`; a row is {text, input_ids}.

    The tokens contain no special tokens; the text is their decoding.
    """

    def __init__(self, parts: Sequence[PreparedSplit], weights: Sequence[float]):
        self.parts = tuple(parts)
        self.rates = [weight / sum(weights) for weight in weights]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self.parts:
            for ids in part:
                yield {"text": self.tokenizer.decode(ids.tolist()), "input_ids": ids}

    @property
    def name(self) -> str:
        """Return its name in messages."""
        return ", ".join(str(part.source.folder) for part in self.parts)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the tokens."""
        return self.parts[0].source.tokenizer

    def tokenizer_for(self, config: TokenizerConfig) -> Tokenizer:
        """Return the tokenizer of a new run; raises `InputError` if `config` names another tokenizer."""
        if config.path is not None:
            self.check_tokenizer(load_tokenizer(config.path), f"tokenizer.path: {config.path}")
        return self.tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer, name: str) -> None:
        """Raise `InputError` if `tokenizer`, called `name` in messages, did not produce the tokens."""
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise InputError(
                f"{name}: not the tokenizer that {self.name} was prepared with ({len(tokenizer):,} tokens, "
                f"there {len(self.tokenizer):,}); prepare it again by polyformer data prepare --tokenizer"
            )

    @property
    def counts(self) -> dict[str, float]:
        """Return words and bytes of the text, if they are known for all parts."""
        counts = [part.counts for part in self.parts]
        return (
            {name: sum(part[name] for part in counts) for name in ("words", "bytes")} if all(counts) else {}
        )


def is_prepared_source(path: str | None) -> bool:
    """Return whether `path` is a folder of prepared text, or a mixture of such folders."""
    return path is not None and (is_prepared(path) or _is_mixture(path))


def prepared_files(path: str) -> list[Path]:
    """Return the files that show changes of prepared text: manifests, with all checksums, and the mixture."""
    mixture = [] if is_prepared(path) else [Path(path)]
    return [*mixture, *(folder / MANIFEST for folder in weighted_folders(path))]


def open_prepared(path: str, split: str) -> PreparedText | None:
    """Open a split of the folder, or of the mixture, `path`; None if the split does not exist.

    Raises `InputError` for an unfinished or damaged folder, and for parts with different tokenizers.
    """
    folders = weighted_folders(path)
    parts = [(PreparedFolder(folder).split(split), weight) for folder, weight in folders.items()]
    there = [(part, weight) for part, weight in parts if part is not None]
    if not there:
        return None
    text = PreparedText([part for part, _ in there], [weight for _, weight in there])
    for part in text.parts:
        text.check_tokenizer(part.source.tokenizer, f"{path}: {part.source.folder}")
    return text


def _is_mixture(path: str) -> bool:
    return path.endswith(MIXTURES) and Path(path).is_file()


def weighted_folders(path: str) -> dict[Path, float]:
    """Return the folders of a mixture with their weights, in order; only `path` if it is not a mixture.

    Raises `InputError` for an invalid mixture.
    """
    return _weights(Path(path)) if _is_mixture(path) else {Path(path): 1.0}


def _weights(path: Path) -> dict[Path, float]:
    try:
        tree = parse_yaml(read_bounded(path, YAML_BYTES).decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason})") from error
    if not isinstance(tree, dict) or not tree:
        raise InputError(f"{path}: expected folders and weights, as in 'books: 0.7', got {quote(tree)}")
    for name, weight in tree.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < float("inf"):
            raise InputError(f"{path}: {name}: expected a weight above 0, got {quote(weight)}")
    return {path.parent / str(name): float(weight) for name, weight in tree.items()}
