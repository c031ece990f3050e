"""Translation in two directions by one model, with few pairs in one direction."""

import itertools
from pathlib import Path

from polyformer.data import DataConfig, read
from polyformer.training.recipes.recipe import with_data
from polyformer_lab.cells import preparation
from polyformer_lab.measures.texts import write_lines

SIDES = ("source", "target")


@preparation
def directions(folder: Path, source: str, rare: int, common: int, held_out: int) -> None:
    """Write pairs of Multi30k; each source begins with the name of the target language.

    The files are rare.jsonl (German to English), both.jsonl (these pairs, and English to German with other
    sentences), and validation.jsonl (German to English).

    Args:
        folder: the output folder.
        source: the directory of Multi30k.
        rare: the number of pairs of German to English.
        common: the number of pairs of English to German, the sentences after the rare pairs.
        held_out: the number of validation pairs.
    """
    english = _pairs(source, "train", rare + common)
    few = [_marked("en", german, text) for text, german in english[:rare]]
    many = [_marked("de", text, german) for text, german in english[rare:]]
    held = [_marked("en", german, text) for text, german in _pairs(source, "val", held_out)]
    for name, rows in {"rare": few, "both": few + many, "validation": held}.items():
        write_lines(folder, name, rows)


def _pairs(folder: str, split: str, count: int) -> list[tuple[str, ...]]:
    return list(zip(*first_sentences(folder, f"{split}.{{en,de}}.gz", count)))


def first_sentences(folder: str, files: str, count: int) -> list[list[str]]:
    """Return the first sources, and the first targets, of two files in the directory of Multi30k."""
    data = DataConfig.from_dict(with_data({"path": files}, folder))
    rows = [dict(row) for row in itertools.islice(read(data, SIDES, data.path), count)]
    return [[str(row[side]) for row in rows] for side in SIDES]


def _marked(language: str, source: str, target: str) -> dict[str, str]:
    return dict(zip(SIDES, (f"={language} {source}", target)))
