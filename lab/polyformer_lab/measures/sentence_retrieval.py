"""Retrieval of translations by the mean vectors of an encoder."""

from collections.abc import Iterator, Sequence

import numpy as np

from polyformer.training.tasks import TextTask
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.probing import features
from polyformer_lab.measures.translation_directions import first_sentences


@measurement("layer")
def sentence_retrieval(
    cell: Cell, folder: str, sentences: int, languages: Sequence[str] = ("en", "de")
) -> Iterator[Row]:
    """Yield by layer (0: the embedding) the accuracy with which sentences find their translations.

    The last row has the validation loss of the training as well.

    Args:
        cell: a pre-training of an encoder.
        folder: the directory of Multi30k; its test text is read.
        sentences: the number of its first sentences, among which each translation is searched.
        languages: the languages of source and target.
    """
    fitted = cell.fitted
    assert isinstance(fitted.task, TextTask)
    files = f"test_2016_flickr.{{{','.join(languages)}}}.gz"
    both = first_sentences(folder, files, sentences)
    vectors = [features(fitted.task, fitted.model, texts) for texts in both]
    losses = {"validation.loss": fitted.scores["validation"]["loss"]}
    for layer, (source, target) in enumerate(zip(*vectors)):
        last = losses if layer == len(vectors[0]) - 1 else {}
        yield {"layer": layer, "accuracy": matched(source, target), **last}


def matched(source: np.ndarray, target: np.ndarray) -> float:
    """Return the share of rows [N, E] with the largest cosine at their own row of the other side.

    It is the mean of both directions. The mean over the rows of each side is subtracted, as all sentences of
    a language share a direction.
    """
    centred = [side - side.mean(0) for side in (source, target)]
    first, second = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in centred)
    cosines = first @ second.T
    right = np.arange(len(cosines))
    return float(np.mean([(each.argmax(1) == right).mean() for each in (cosines, cosines.T)]))
