"""Tokenizers: trained, or loaded from files of this library, of transformers and of others.

`tokenizer` converts between text and ids. `pipelines` has the steps of that conversion and their training.
`checkpoints` and `model_files` read the tokenizers of others.
"""

from collections.abc import Iterable
from pathlib import Path

from polyformer.core.foreign_checkpoints import check_no_revision, fetched
from polyformer.core.paths import checked_path
from polyformer.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer that `config` describes: loaded from its path, or trained on `texts`."""
    return load_tokenizer(config.path) if config.path else Tokenizer.train(config, texts)


def load_tokenizer(
    path: str | Path,
    *,
    merges: str | Path | None = None,
    lowercase: bool | None = None,
    revision: str | None = None,
) -> Tokenizer:
    """Load the tokenizer in `path`: a directory in the hub's layout, or a file of a tokenizer.

    In a directory `tokenizer.json` is preferred; otherwise transformers (`pip install 'polyformer[hub]'`)
    loads the class named by tokenizer_config.json or config.json. A single vocabulary file, also alone in a
    directory, determines the kind. A `vocab.txt` is WordPiece, with `lowercase` by default true if no
    ordinary token has a capital letter. A `vocab.json` (byte-level BPE) needs its `merges`, by default the
    `merges.txt` in the same folder. A `.model` is SentencePiece's, and a `.gguf` contains a tokenizer. With a
    `revision` (a commit, a tag or a branch), or as "owner/name@revision", `path` is a name on the hub, and
    its directory is fetched.
    """
    from polyformer.data.tokenizers.checkpoints import load

    if checked_path(path).exists():
        check_no_revision(path, revision)
    elif revision is not None or "@" in str(path):
        path = fetched(str(path), revision)
    return load(Path(path), merges=Path(merges) if merges else None, lowercase=lowercase)
