"""Texts of several kinds with a control code in front, and the kind of the texts that a decoder then writes.

Keskar et al. 2019 (CTRL), sections 3 and 4.
"""

import collections
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from polyformer.data.sources.libraries import library_documents
from polyformer.models.generation import GenerationConfig
from polyformer.training.tasks import LanguageModelling
from polyformer_lab.cells import Cell, Row, measurement, preparation
from polyformer_lab.measures.texts import SPLITS, split_texts, spread, write_rows

CODES = "python", "prose"
"""The codes: the sources of Python's library, and a text."""

LENGTH = 300
"""The number of characters of a document behind its code."""

ORDER = 3
"""The number of characters of an n-gram."""


@preparation
def coded_documents(folder: Path, text: str | None, characters: int) -> None:
    """Write documents of `LENGTH` characters, each behind the line with its code.

    Every twentieth document is held out.

    Args:
        folder: the output folder.
        text: as for `documents`; it is the prose.
        characters: the number of characters of each kind, evenly spread over its texts.
    """
    kinds = zip(CODES, (library_documents(), split_texts(text)["train"]))
    documents = [
        f"{code}\n{piece}" for code, texts in kinds for piece in spread(cut(texts), characters // LENGTH)
    ]
    held_out = documents[::20]
    del documents[::20]
    for split, rows in zip(SPLITS, (documents, held_out)):
        write_rows(folder, split, rows)


def cut(texts: Iterable[str]) -> list[str]:
    """Return the joined texts in pieces of `LENGTH` characters, without a shorter rest."""
    whole = "".join(texts)
    return [whole[end - LENGTH : end] for end in range(LENGTH, len(whole) + 1, LENGTH)]


class Judge:
    """A classifier of texts by n-grams of characters, each kind with add-one smoothing."""

    def __init__(self, documents: Mapping[str, Sequence[str]]):
        counts = {
            kind: collections.Counter(itertools.chain.from_iterable(map(grams, texts)))
            for kind, texts in documents.items()
        }
        different = len(set().union(*counts.values())) + 1
        self.totals = {kind: own.total() + different for kind, own in counts.items()}
        self.counts = counts

    def kind(self, text: str) -> str:
        """Return the kind under which the text is most likely."""

        def likelihood(kind: str) -> float:
            own, total = self.counts[kind], self.totals[kind]
            return sum(math.log((own[gram] + 1) / total) for gram in grams(text))

        return max(self.counts, key=likelihood)

    def share(self, texts: Sequence[str], kind: str) -> float:
        """Return the share of the texts that are of this kind."""
        return sum(self.kind(text) == kind for text in texts) / len(texts)


def grams(text: str) -> list[str]:
    """Return all n-grams of the characters of a text."""
    return [text[start : start + ORDER] for start in range(len(text) - ORDER + 1)]


@measurement("code")
def control_codes(cell: Cell, folder: str, prompts: Sequence[str], texts: int, tokens: int) -> list[Row]:
    """Return for each code the share of written texts that are of its kind.

    Only the continuations are judged, without code and prompt, by a `Judge` of the training documents.

    Args:
        cell: the training of a decoder on the documents of `coded_documents`.
        folder: their folder.
        prompts: texts behind the code, equal for all codes.
        texts: the number of samples for each code and prompt.
        tokens: the number of tokens of a sample.

    Returns:
        right: the share that are of the code's kind.
        judged: the same of the held-out documents of the kind.
    """
    task, model = cast(LanguageModelling, cell.fitted.task), cell.fitted.model.eval()
    train, held_out = (by_code(Path(folder, f"{split}.jsonl")) for split in SPLITS)
    judge = Judge(train)
    config = GenerationConfig.from_dict(
        {
            "max_new_tokens": tokens,
            "min_new_tokens": tokens,
            "num_return_sequences": texts,
            "sampling": {"do_sample": True, "seed": cell.seed},
        }
    )
    rows = []
    for code in CODES:
        with torch.no_grad():
            samples = [
                sample for prompt in prompts for sample in task.generate(model, f"{code}\n{prompt}", config)
            ]
        rows.append(
            {"code": code, "right": judge.share(samples, code), "judged": judge.share(held_out[code], code)}
        )
    return rows


def by_code(file: Path) -> dict[str, list[str]]:
    """Return the documents of a file written by `coded_documents` by their code, without it."""
    documents: dict[str, list[str]] = {code: [] for code in CODES}
    for line in file.read_text(encoding="utf-8").splitlines():
        code, _, text = json.loads(line)["text"].partition("\n")
        documents[code].append(text)
    return documents
