"""Short texts with the first sentence as summary."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from polyformer.data import DataConfig
from polyformer.data.formats.questions_and_summaries import HEADING
from polyformer.training.recipes.recipe import with_data
from polyformer_lab.cells import preparation
from polyformer_lab.measures.texts import texts_of, write_lines

END = " . "
"""The end of a sentence in WikiText, which separates full stops from words, except those of abbreviations."""

WORDS = range(5, 26)
"""Numbers of words of a sentence that is a summary, with its full stop."""


@preparation
def opening_sentences(folder: Path, text: str, words: int, train: int, validation: int) -> None:
    """Write train.jsonl and validation.jsonl with pairs from paragraphs of WikiText-2.

    The source is the beginning of a paragraph, the target its first sentence. Paragraphs of a single sentence
    and those with another number of words in the first than `WORDS` are left out.

    Args:
        folder: the output folder.
        text: the directory of WikiText-2.
        words: the number of words of a source, or fewer in a short paragraph.
        train: the most training pairs.
        validation: the most validation pairs.
    """
    for split, file, most in (("train", "train", train), ("validation", "valid", validation)):
        rows = itertools.islice(_pairs(text, f"{file}.txt.gz", words), most)
        write_lines(folder, split, rows)


def _pairs(text: str, file: str, words: int) -> Iterator[dict[str, str]]:
    data = DataConfig.from_dict(with_data({"path": file, "format": "lines", "streaming": True}, text))
    for line in map(str.strip, texts_of(data)):
        first, end, rest = line.partition(END)
        if rest and len((first + end).split()) in WORDS and not HEADING.fullmatch(line):
            yield {"source": " ".join(line.split()[:words]), "target": first + end.rstrip()}
