"""Training of word vectors, skip-gram or CBOW, by gensim: a file for `train --pretrained-vectors`.

Words are runs of letters and digits, in lower case unless `cased`. Mikolov et al. 2013.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.core.imports import needs_extra
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.data.prepared.folder import Settings
from polyformer.data.prepared.preparing import pieces, sources_of, texts_of

WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class VectorSettings(Config):
    """Options of the training; gensim's defaults otherwise."""

    algorithm: Literal["skipgram", "cbow"] = "skipgram"
    width: PositiveInt = 64
    epochs: PositiveInt = 5
    window: PositiveInt = 5  # words on either side, at most
    least: PositiveInt = 5  # occurrences of a word that gets a vector
    cased: bool = False
    seed: NonNegativeInt = 0
    workers: PositiveInt = 1  # with several threads a repetition gives other vectors


class Sentences:
    """An iterable over the lines of texts, each a list of words; gensim reads it once per epoch."""

    def __init__(self, names: Sequence[str], reading: Settings, cased: bool):
        self.sources = [name for name, _ in sources_of(names)]
        self.reading, self.cased = reading, cased

    def __iter__(self) -> Iterator[list[str]]:
        for source in self.sources:
            for text in texts_of(source, self.reading):
                for line in (line for piece in pieces(text) for line in piece.splitlines()):
                    words = WORD.findall(line if self.cased else line.lower())
                    if words:
                        yield words


def train_word_vectors(
    names: Sequence[str], out: Path, settings: VectorSettings, reading: Settings
) -> tuple[int, int]:
    """Train vectors on texts, write them in word2vec's binary format, and return (vectors, words read).

    Raises `InputError` without gensim, for texts without frequent words, and for a file that cannot be
    written.
    """
    with needs_extra("vectors", "data vectors: skip-gram and CBOW are trained by gensim"):
        from gensim.models import Word2Vec  # type: ignore[import-untyped]
    sentences = Sentences(names, reading, settings.cased)
    model: Any = Word2Vec(
        vector_size=settings.width,
        window=settings.window,
        min_count=settings.least,
        sg=int(settings.algorithm == "skipgram"),
        seed=settings.seed,
        workers=settings.workers,
    )
    model.build_vocab(sentences)
    if not len(model.wv):
        raise InputError(
            f"FILES: no word occurs {settings.least} times or more; name longer texts or lower --least"
        )
    model.train(sentences, total_examples=model.corpus_count, epochs=settings.epochs)
    atomic_write(out, lambda path: model.wv.save_word2vec_format(str(path), binary=True))
    return len(model.wv), int(model.corpus_total_words)
