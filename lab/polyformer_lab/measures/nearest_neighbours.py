"""kNN-LM: a checkpoint's predictions mixed with the continuations of the nearest stored contexts."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from polyformer.applications.retrieval.build import build, manifest_of
from polyformer.applications.retrieval.entries import Manifest
from polyformer.applications.retrieval.mixture import measured
from polyformer.applications.retrieval.neighbours import Text
from polyformer.applications.retrieval.readers import ContextReader, Reading, open_reader
from polyformer.applications.retrieval.search import IndexConfig, make_index
from polyformer.applications.retrieval.store import FolderStore, open_folder
from polyformer.core.errors import InputError
from polyformer.data import DataConfig
from polyformer.data.sources.checks import fingerprint
from polyformer.training.recipes.recipe import with_data
from polyformer.training.tasks.metrics import exp
from polyformer_lab.cells import Cell, Row, measurement, preparation
from polyformer_lab.measures.texts import texts_of


@preparation
def datastore(folder: Path, model: str, text: str, characters: int, length: int) -> None:
    """Build the store of the beginning of the training text, and its index if it has enough entries.

    Args:
        folder: the folder for `store`; a build that was stopped is resumed.
        model: the folder of a run or checkpoint.
        text: the directory of WikiText-2.
        characters: the number of characters that are read, to the end of a line.
        length: tokens per forward pass.
    """
    reader, data, store = open_reader(model), _data(text, "train"), folder / "store"
    files = ({**fingerprint(data, ("text",))["path"][0], "characters": characters},)
    manifest = build_store(
        reader, beginning(texts_of(data), characters), files, reader.reading(length, 0), store
    )
    if (opened := open_folder(store)).index is None:
        try:
            make_index(store, manifest, opened.keys, IndexConfig())
        except InputError as error:
            print(error)


@measurement("neighbours")
def nearest_neighbours(
    cell: Cell, model: str, text: str, store: str, share: float, tokens: int, neighbours: Sequence[int]
) -> Iterator[Row]:
    """Yield the perplexity of the validation text by numbers of neighbours, with the best lambda and T.

    With the whole store the first row has the perplexities of the test text: of the model without the store
    (`none`), and with the best settings for a comparison with all keys (`flat`) and for an index.

    Args:
        cell: a cell without a recipe.
        model: the folder of the checkpoint that the store was built with.
        text: the directory of WikiText-2.
        store: the folder of the store.
        share: the part of the store that is searched, from its beginning.
        tokens: the number of tokens of each text that are read.
        neighbours: the numbers of neighbours.
    """
    reader, whole = open_reader(model), open_folder(Path(store))
    entries = max(1, int(share * len(whole.keys)))
    part = FolderStore(whole.folder, whole.manifest, whole.keys[:entries], whole.values[:entries])
    valid = measured(reader, part, texts_of(_data(text, "valid")), tuple(neighbours), tokens=tokens)
    best = [valid.best(index) for index in range(len(neighbours))]
    if share == 1:
        mixture, _ = min(best, key=lambda each: each[1])
        row: Row = {"validation.none": perplexity(valid.log_p)}
        for name, searched in {"flat": part, **({"index": whole} if whole.index else {})}.items():
            texts, counts = texts_of(_data(text, "test")), (mixture.neighbours,)
            test = measured(reader, searched, texts, counts, [mixture.temperature], tokens)
            row["test.none"] = perplexity(test.log_p)
            row[f"test.{name}"] = exp(float(test.losses(mixture.weight)))
            row[f"milliseconds.{name}"] = 1e3 * test.seconds[1] / len(test.log_p)
        yield row
    for mixture, loss in best:
        yield {
            "neighbours": mixture.neighbours,
            "entries": entries,
            "lambda": mixture.weight,
            "temperature": mixture.temperature,
            "perplexity": exp(loss),
        }


def build_store(
    reader: ContextReader, texts: Iterable[str], files: Text, reading: Reading, folder: Path
) -> Manifest:
    """Build the store of the contexts that a model reads in texts, or resume building it."""
    return build(reader, texts, manifest_of(reader, reading, files), folder)


def beginning(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield the first `characters` characters of a text, to the end of a line."""
    for text in texts:
        if len(text) >= characters:
            yield text[: text.find("\n", characters) + 1]
            return
        characters -= len(text)
        yield text


def perplexity(log_p: Tensor) -> float:
    """Return exp of the mean loss."""
    return exp(-float(log_p.double().mean()))


def _data(folder: str, split: str) -> DataConfig:
    return DataConfig.from_dict(with_data({"path": f"{split}.txt.gz", "streaming": True}, folder))
