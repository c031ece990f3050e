"""Tokenizers from files, of this library, of transformers and of others."""

from collections.abc import Iterable
from pathlib import Path

from polyformer.core.hub_names import check_no_revision, fetched
from polyformer.data.tokenizer import Tokenizer, TokenizerConfig


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `config` describes: loaded from its path, or trained on `texts`."""
    return load_tokenizer(config.path) if config.path else Tokenizer.train(config, texts)


def load_tokenizer(
    path: str | Path,
    *,
    merges: str | Path | None = None,
    lowercase: bool | None = None,
    revision: str | None = None,
) -> Tokenizer:
    """The tokenizer in `path`: a directory in the hub's layout, or one of the files that tokenizers have.

    In a directory `tokenizer.json` is preferred; without it the family that tokenizer_config.json or
    config.json names reads its own files (vocab.txt, vocab.json and merges.txt, a SentencePiece model).
    A file stands for itself: `vocab.txt` is WordPiece, whose `lowercase` is by default true when no
    ordinary token has a capital letter; a `vocab.json` (byte-level BPE) needs its `merges`, by default
    the `merges.txt` beside it; a `.model` is SentencePiece's; a `.gguf` has one inside. With a `revision` (a
    commit, a tag or a branch), or as "owner/name@revision", `path` is a name on the hub, whose directory is
    fetched.
    """
    from polyformer.data.hub_tokenizer import load

    if Path(path).exists():
        check_no_revision(path, revision)
    elif revision is not None or "@" in str(path):
        path = fetched(str(path), revision)
    return load(Path(path), merges=Path(merges) if merges else None, lowercase=lowercase)
