"""Selection of the data files in a directory, by the usual names of splits, or all files of one kind.

    train.tsv  dev.tsv  test.tsv  README  LICENSE        a file per split
    vi_ud-train.conllu  vi_ud-dev.conllu                 the split anywhere in the name
    train.en.gz  train.vi.gz  valid.en.gz  valid.vi.gz   parallel text
    part-0.jsonl  part-1.jsonl  checksums.txt            one source

Files without data are left out: files with usual names of documentation (README, LICENSE, ...), files of
unknown formats, and texts next to a larger text with columns. IDX files of labels are read with the images.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyformer.core.errors import InputError
from polyformer.data.formats.readers import SUFFIXES
from polyformer.data.formats.tables import has_tabs
from polyformer.data.sources.files import plain_name
from polyformer.data.sources.origins import SPLITS, has_images, is_stray, label_folders


@dataclass
class DirectorySources:
    """The sources of a directory by role (path, validation, test), the reason, and the files left out."""

    sources: dict[str, str]
    why: str = ""
    left_out: list[str] = field(default_factory=list)


def choose_files(folder: Path) -> DirectorySources:
    """Return the sources in `folder`, or the folder itself if it has folders of texts or images.

    Raises `InputError` if the choice of files is ambiguous.
    """
    if label_folders(folder) or has_images(folder):
        return DirectorySources({"path": str(folder)})
    splits = {split: _folders(folder, names) for split, names in SPLITS.items()}
    if any(splits.values()):
        return DirectorySources({"path": str(folder), **({"test": str(folder)} if splits["test"] else {})})
    shown = (path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    every = sorted(path for path in shown if not _is_idx_labels(path))
    files = [path for path in every if not is_stray(path)]
    known = [path for path in files if _kind(path)]
    # Parallel files end in the names of their languages, which are no formats.
    if known and not _are_parallel(files):
        files = known
    files = _without_notices(files)
    named = {split: _of_split(files, names) for split, names in SPLITS.items()}
    if named["train"]:
        roles = {"path": "train", "validation": "validation", "test": "test"}
        sources = {role: _one_source(named[split]) for role, split in roles.items() if named[split]}
        used = [path for files in named.values() for path in files]
        return DirectorySources(sources, "by their names", [path.name for path in every if path not in used])
    left_out = [path.name for path in every if path not in files]
    if _are_parallel(files) or (len(files) == 1 and known):
        return DirectorySources({"path": _one_source(files)}, "all that are there", left_out)
    if known and len({_kind(path) for path in files}) == 1 and len({_ending(path) for path in files}) == 1:
        _check_pattern(folder, every, files)
        return DirectorySources({"path": f"{folder}/*{_ending(files[0])}"}, "all that are there", left_out)
    names = ", ".join(path.name for path in sorted(folder.iterdir())[:6]) or "nothing"
    raise InputError(
        f"--data {folder}: cannot tell what to train on in this directory, which has {names}; name a "
        "file, a pattern such as 'DIR/*.txt', or two parallel files as 'DIR/train.{en,vi}'"
    )


def _check_pattern(folder: Path, every: list[Path], files: list[Path]) -> None:
    """Raise `InputError` if a pattern for `files` would match another file, which is no data."""
    alike = (path for path in every if _ending(path) == _ending(files[0]) and not is_stray(path))
    for path in alike:
        if path not in files:
            raise InputError(
                f"--data {folder}: {path.name} has no columns, unlike {files[0].name}; move it elsewhere, or "
                "name the files with data by a pattern"
            )


def _without_notices(files: list[Path]) -> list[Path]:
    """Return the files without plain texts if the largest .txt is a table: its notices have no columns."""
    texts = [path for path in files if suffix(path) == ".txt"]
    if len(texts) < 2 or not has_tabs(max(texts, key=lambda path: path.stat().st_size)):
        return files
    return [path for path in files if path not in texts or has_tabs(path)]


def suffix(path: Path | str) -> str:
    """Return the suffix that defines the format: the last, without `.gz` or `.zst`, in lower case."""
    return Path(plain_name(Path(path).name)).suffix.lower()


def _kind(file: Path) -> str | None:
    """Return the format of a file by its name; None if it is not known."""
    return "idx" if plain_name(file.name).endswith("ubyte") else SUFFIXES.get(suffix(file))


def _is_idx_labels(file: Path) -> bool:
    """Return whether it is a file of labels, which is read with its file of images."""
    name = plain_name(file.name)
    return name.endswith("ubyte") and "idx1" in name


def _ending(file: Path) -> str:
    plain = plain_name(file.name)
    return Path(plain).suffix + file.name.removeprefix(plain)


def _folders(folder: Path, names: Sequence[str]) -> list[Path]:
    inside = [folder / name for name in names if (folder / name).is_dir()]
    return [folder for folder in inside if label_folders(folder) or has_images(folder)]


def _of_split(files: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """Return the files named by one of `names`; if there are none, the files with one of them as a word."""
    for words in (
        lambda name: [name.partition(".")[0]],
        lambda name: re.findall(r"t10k|[a-z]+", name.lower()),
    ):
        for wanted in names:
            if chosen := [
                path for path in files if any(word.removesuffix("ing") == wanted for word in words(path.name))
            ]:
                return chosen
    return []


def _are_parallel(files: Sequence[Path]) -> bool:
    """Return whether every file has exactly one partner with the same name except for the language suffix."""
    names = [path.name.removesuffix(".gz") for path in files]
    stems = [name.rpartition(".")[0] for name in names]
    plain = all(Path(name).suffix.lower() not in SUFFIXES for name in names)
    return plain and bool(files) and all(stem and stems.count(stem) == 2 for stem in stems)


def _one_source(files: Sequence[Path]) -> str:
    """Return a file, or two parallel files as one pattern."""
    if len(files) == 1:
        return str(files[0])
    names = [path.name.removesuffix(".gz") for path in files]
    packed = ".gz" if all(path.name.endswith(".gz") for path in files) else ""
    if len(files) != 2 or not _are_parallel(files):
        several = ", ".join(path.name for path in files[:6])
        raise InputError(
            f"--data {files[0].parent}: several files could be meant, {several}; name one, or two "
            "parallel ones as 'DIR/train.{en,vi}'"
        )
    ends = [name.rpartition(".")[2] for name in names]
    return str(files[0].parent / f"{names[0].rpartition('.')[0]}.{{{ends[0]},{ends[1]}}}{packed}")
