"""kNN-LM in two domains: the mixing weight that a run chooses with a store of each."""

from collections.abc import Iterator
from pathlib import Path

from polyformer.applications.retrieval.mixture import measured
from polyformer.applications.retrieval.readers import open_reader
from polyformer.applications.retrieval.store import open_folder
from polyformer.training.tasks.metrics import exp
from polyformer_lab.cells import Cell, Row, measurement, preparation
from polyformer_lab.measures.nearest_neighbours import beginning, build_store, perplexity
from polyformer_lab.measures.spalm import files_of, rows_of
from polyformer_lab.measures.texts import articles, book, pieces, write_rows


@preparation
def two_domains(folder: Path, text: str, other: str, characters: int, held_out: int) -> None:
    """Write the beginnings of WikiText-2 by `articles`, and of a book in the folder `other`.

    Args:
        folder: the output folder.
        text: the directory of WikiText-2.
        other: the file of the book.
        characters: the number of characters of each training text.
        held_out: the number of characters of each other text.
    """
    articles(folder, text, characters, held_out)
    (folder / "other").mkdir(exist_ok=True)
    for split, part, most in zip(("train", "validation"), book(other), (characters, held_out)):
        write_rows(folder / "other", split, beginning(pieces(part), most))


@measurement("domain")
def domain_weights(cell: Cell, texts: str, length: int, neighbours: int, tokens: int) -> Iterator[Row]:
    """Yield for each domain the lowest validation perplexity, and its lambda (`weight`) and temperature.

    The store of each domain has its training text. `none` is the perplexity without the store.

    Args:
        cell: a run without a memory, trained in the domain `own`.
        texts: the folder of `two_domains`.
        length: tokens per forward pass.
        neighbours: the number of neighbours.
        tokens: the number of validation tokens.
    """
    reader = open_reader(cell.fitted.run.folder, "cpu")
    for domain, folder in (("own", Path(texts)), ("other", Path(texts, "other"))):
        train, validation = (str(folder / f"{split}.jsonl") for split in ("train", "validation"))
        store = cell.folder / f"store-{domain}"
        manifest = build_store(reader, rows_of(train), files_of(train), reader.reading(length, 0), store)
        valid = measured(reader, open_folder(store), rows_of(validation), (neighbours,), tokens=tokens)
        best, loss = valid.best()
        yield {
            "domain": domain,
            "entries": manifest.count,
            "weight": best.weight,
            "temperature": best.temperature,
            "none": perplexity(valid.log_p),
            "perplexity": exp(loss),
        }
