"""Tokenize text into files that training memory-maps: the text may be larger than memory.

`prepare` reads FILES (names, quoted patterns, or addresses such as s3://bucket/*.jsonl.zst), holds out some
documents for validation, and writes the tokens to DIR. To resume an interrupted run, repeat the same command.
The result does not depend on the number of workers. Train on it with `polyformer train RECIPE --data DIR`.
`show` prints the contents of DIR, and `verify` compares them with their checksums. Both also accept a mixture
(mix.yaml). `vectors` trains word vectors of FILES, skip-gram or CBOW, and writes DIR/vectors.bin for
`polyformer train --pretrained-vectors`.
"""

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyformer.cli.commands.options import argument, option, refuse, set_options
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import COUNT

if TYPE_CHECKING:
    from polyformer.data.prepared import Settings
    from polyformer.data.prepared.preparing import Progress

EXAMPLES = """examples:
  polyformer data prepare 'books/*.txt' 'web/*.jsonl.zst' --tokenizer train --out prepared
  polyformer data prepare 's3://bucket/part-*.parquet' --column content --tokenizer GPT2-DIR --out prepared
  polyformer data show prepared
  polyformer data verify mix.yaml
  polyformer train wikitext2 --data prepared
  polyformer data vectors reviews.txt --format lines --width 64 --out vectors
"""

SAMPLE = 10**8
"""Characters to train a tokenizer on, the same number from each source."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of `polyformer data`."""

    what: Literal["prepare", "show", "verify", "vectors"] = argument("action", metavar="WHAT")
    names: tuple[str, ...] = argument(
        "for prepare and vectors: files, patterns, addresses, hub:OWNER/NAME; for show and verify: folders "
        "or mixtures",
        metavar="FILE",
    )
    out: str | None = option(
        "for prepare and vectors: output folder, new or, for prepare, from an interrupted run",
        metavar="DIR",
        output="folder",
    )
    tokenizer: str | None = option(
        "for prepare: folder or file of a tokenizer (a run, a checkpoint, other prepared text), or 'train' "
        "to train a tokenizer on the text"
    )
    workers: int | None = option(
        "for prepare and vectors: number of threads (default: number of cores, for vectors 1)"
    )
    format: str | None = option(
        "for prepare and vectors: format of FILES, if the names do not show it: text, lines, jsonl, ..."
    )
    column: str | None = option(
        "for prepare and vectors: column of tables that contains the text (default: text)"
    )
    validation: float | None = option(
        "for prepare: share of the text to hold out, evenly spread, or number of documents to hold out from "
        "the beginning (default: 0.005)"
    )
    shard_tokens: int | None = option("for prepare: minimum tokens per file (default: 134217728)", most=COUNT)
    algorithm: str | None = option(
        "for --tokenizer train: bpe (default), bytes, characters, unigram, wordpiece; for vectors: skipgram "
        "(default), cbow"
    )
    vocab_size: int | None = option("for --tokenizer train: size of the vocabulary (default: 8192)")
    documents: int | None = option("for show: number of documents to preview (default: 3)")
    width: int | None = option("for vectors: numbers per word (default: 64)")
    epochs: int | None = option("for vectors: passes over the texts (default: 5)")
    window: int | None = option("for vectors: context words on either side (default: 5)")
    least: int | None = option("for vectors: occurrences of a word that gets a vector (default: 5)")
    cased: bool = option("for vectors: keep upper case", False)
    seed: int | None = option("for vectors: seed of the training (default: 0)")


def run(options: DataOptions) -> None:
    """Prepare, show, verify or train vectors."""
    own = {"prepare": {*_PREPARE}, "show": {"documents"}, "verify": set(), "vectors": {*_VECTORS, *_READ}}
    others = {*_PREPARE, *_VECTORS, *_READ, "documents"} - own[options.what]
    refuse(options, sorted(others), f"not an option of `data {options.what}`")
    does = {"prepare": prepare_text, "show": show, "verify": verify, "vectors": train_vectors}
    does[options.what](options)


_PREPARE = (
    *("out", "tokenizer", "workers", "format", "column", "validation"),
    *("shard_tokens", "algorithm", "vocab_size"),
)
_READ = "format", "column"
_VECTORS = "out", "algorithm", "workers", "width", "epochs", "window", "least", "cased", "seed"


def train_vectors(options: DataOptions) -> None:
    """Train word vectors and write their file."""
    from polyformer.data.prepared import Settings
    from polyformer.data.word_vectors import VectorSettings, train_word_vectors

    if options.out is None:
        raise InputError("--out DIR is missing; see polyformer data --help")
    settings = VectorSettings.from_dict(set_options(options, _VECTORS[1:]), "data vectors")
    reading = Settings(tokenizer="", format=options.format, column=options.column or "text")
    file = Path(options.out) / "vectors.bin"
    vectors, words = train_word_vectors(options.names, file, settings, reading)
    print(f"{file}: {vectors:,} vectors of {settings.width} numbers, from {words:,} words")


def prepare_text(options: DataOptions) -> None:
    """Tokenize the text, or the rest of it after an interruption."""
    from polyformer.data.prepared.preparing import prepare
    from polyformer.training.run_control import sole_writer

    if options.out is None or options.tokenizer is None:
        missing = "--out DIR" if options.out is None else "--tokenizer DIR, or --tokenizer train,"
        raise InputError(f"{missing} is missing; see polyformer data --help")
    folder = Path(options.out)
    with sole_writer(folder, "the same command resumes it"):
        settings = _settings(options, folder)
        workers = (os.cpu_count() or 1) if options.workers is None else options.workers
        manifest = prepare(options.names, settings, folder, workers, report)
    counts = {name: sum(shard.tokens for shard in manifest.of(name)) for name in ("train", "validation")}
    print(f"{folder}: {counts['train']:,} training tokens, {counts['validation']:,} validation tokens")


def _settings(options: DataOptions, folder: Path) -> "Settings":
    """Return the settings, and save the tokenizer in the folder."""
    from polyformer.data.prepared import TOKENIZER, Settings, is_prepared
    from polyformer.data.prepared.preparing import sample
    from polyformer.data.tokenizers import load_tokenizer
    from polyformer.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig

    reading = set_options(options, ("format", "column", "validation", "shard_tokens"))
    settings = Settings(tokenizer="", **reading)
    training = set_options(options, ("algorithm", "vocab_size"))
    if options.tokenizer != "train" and training:
        flag = next(iter(training)).replace("_", "-")
        raise InputError(f"--{flag}: requires --tokenizer train; {options.tokenizer} is already trained")
    trained, begun = "", is_prepared(folder)
    if options.tokenizer == "train":
        config = TokenizerConfig.from_dict(training, "--tokenizer train")
        trained = f"{config.algorithm} {config.vocab_size}"
        if not begun:
            Tokenizer.train(config, sample(options.names, settings, SAMPLE)).save(folder / TOKENIZER)
    else:
        name = Path(str(options.tokenizer))
        source = load_tokenizer(name / TOKENIZER if is_prepared(name) else name)
        if begun:
            return dataclasses.replace(settings, tokenizer=source.fingerprint)
        source.save(folder / TOKENIZER)
    fingerprint = load_tokenizer(folder / TOKENIZER).fingerprint
    return dataclasses.replace(settings, trained=trained, tokenizer=fingerprint)


def show(options: DataOptions) -> None:
    """Print the contents of folders, and the weights of mixtures."""
    from polyformer.data.prepared.rows import weighted_folders

    documents = 3 if options.documents is None else options.documents
    for name in options.names:
        folders = weighted_folders(name)
        for folder, weight in folders.items():
            if len(folders) > 1:
                print(f"{name}: {weight / sum(folders.values()):.1%} of the rows are from {folder}")
            show_folder(folder, documents)


def show_folder(path: Path, documents: int) -> None:
    """Print the contents of a folder, and the beginnings of its first documents."""
    from polyformer.data.prepared import PreparedFolder

    folder = PreparedFolder(path)
    manifest = folder.manifest
    size = sum(source.bytes for source in manifest.sources)
    print(f"{path}: {len(manifest.sources)} sources, {size:,} bytes")
    print(f"tokenizer: {len(folder.tokenizer):,} tokens, ids of {manifest.dtype.itemsize} bytes")
    for split in filter(None, map(folder.split, ("train", "validation"))):
        print(f"{split.name}: {split.tokens:,} tokens, {len(split):,} documents, {len(split.shards)} shards")
    train = folder.split("train") or ()
    for number in range(min(documents, len(train))):
        print(f"{number}: {quote(folder.tokenizer.decode(train[number][:100].tolist()))}")


def verify(options: DataOptions) -> None:
    """Compare folders, including those of mixtures, with their checksums."""
    from polyformer.data.prepared import PreparedFolder
    from polyformer.data.prepared.rows import weighted_folders

    for path in dict.fromkeys(folder for name in options.names for folder in weighted_folders(name)):
        folder = PreparedFolder(path)
        folder.verify()
        tokens = sum(shard.tokens for shard in folder.manifest.shards)
        print(f"{path}: {tokens:,} tokens, checksums match")


def report(progress: "Progress") -> None:
    """Print the progress on standard error."""
    speed = progress.new / progress.seconds if progress.seconds else 0.0
    print(
        f"{progress.tokens:,} tokens of {progress.documents:,} documents, {speed:,.0f} tokens/s; "
        f"source {progress.source} of {progress.sources}",
        file=sys.stderr,
    )
