"""Readers of text with a causal model and its tokenizer, which compute keys and the model's own logits."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.applications.retrieval.fingerprints import changed_settings, model_fingerprint
from polyformer.applications.retrieval.windows import Reading
from polyformer.core.errors import InputError
from polyformer.core.evaluation_mode import evaluating
from polyformer.core.files import read_json
from polyformer.core.foreign_checkpoints import gguf_file, load_by_transformers
from polyformer.core.paths import checked_path
from polyformer.data import Tokenizer, load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.pretrained import CONFIG
from polyformer.models.checkpoints.load import family_of
from polyformer.models.config import max_positions
from polyformer.nn.stack.last_feedforward import LastFeedForwardInput
from polyformer.training.machine import choose_device
from polyformer.training.recipes.reader import Reader as Checkpoint
from polyformer.training.recipes.run import Run, is_checkpoint
from polyformer.training.tasks import LanguageModelling

TEXTS = 64  # texts that are tokenized at once, in parallel

Read = tuple[Tensor, Callable[[], Tensor]]
"""Keys [B, T, D], and a function that computes the logits [B, T, V] of the next tokens."""


class ContextReader(abc.ABC):
    """A reader of texts for the model in `folder`, as in its training: `isolated` or consecutive documents.

    key: kind of the keys. dimension: D. longest: the longest input in tokens; None for no limit.
    """

    key: str
    dimension: int
    longest: int | None
    isolated = False

    def __init__(self, folder: Path, tokenizer: Tokenizer, model: Any, config: object):
        self.folder, self.tokenizer, self.model, self.config = folder, tokenizer, model, config

    @abc.abstractmethod
    def read(self, ids: Tensor, documents: Tensor | None) -> Read:
        """Read ids [B, T]; with `documents` [B, T], tokens attend only within their document."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of documents, including the special tokens before each."""
        marks, _ = self.tokenizer.encode_for_model("")
        if marks and marks[-1] in (self.tokenizer.eos_id, self.tokenizer.sep_id):
            marks = marks[:-1]
        return [[*marks, *ids] for ids in self.tokenizer.encode_batch(texts)]

    def documents(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the documents of a text as token ids, lazily."""
        remaining = iter(texts)
        while several := list(islice(remaining, TEXTS)):
            yield from self.encode(several)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of the `model` and of the `tokenizer`."""
        return {
            "model": model_fingerprint(self.model, self.config),
            "tokenizer": self.tokenizer.fingerprint,
        }

    def reading(self, length: int | None, context: int) -> Reading:
        """Return windows of `length` tokens, by default 512 or the model's limit.

        Raises `InputError` beyond that limit.
        """
        most = self.longest
        if length is not None and most is not None and length > most:
            raise InputError(f"--length: expected at most {most}, which {self.folder} takes, got {length}")
        length = min(512, most or 512) if length is None else length
        return Reading(length=length, context=context, isolated=self.isolated)


class OwnReader(ContextReader):
    """A model of this library: its keys are the inputs of the last feed-forward."""

    key = "feedforward"

    def __init__(self, folder: Path, tokenizer: Tokenizer, model: Transformer):
        config = model.config
        if model.decoder is None or model.encoder is not None or not model.head.predicts_next:
            raise InputError(f"{folder}: expected a decoder alone that predicts the next token")
        settings = changed_settings(dataclasses.replace(config, origin=None))
        super().__init__(folder, tokenizer, model, settings)
        self.dimension, self.longest = config.hidden_size, max_positions(config)

    @torch.no_grad()
    def read(self, ids: Tensor, documents: Tensor | None) -> Read:
        """Read a batch, see `ContextReader.read`."""
        decoder = self.model.decoder
        with evaluating(self.model), LastFeedForwardInput(decoder) as last:
            output = self.model(ids, document_ids=documents)
            return last.value, torch.no_grad()(lambda: output.logits)


class RunReader(OwnReader):
    """A run of `polyformer train`: documents are enclosed in <bos> and <eos> and isolated from each other."""

    isolated = True

    def __init__(self, run: Run, device: str):
        self.task = run.task_of(LanguageModelling)
        super().__init__(run.folder, run.tokenizer, run.model(device))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of <bos> text <eos> for each text."""
        return self.task.documents([{"text": text} for text in texts])


class TransformersReader(ContextReader):
    """Any other causal model of transformers: its keys are the last hidden states, the input of the head."""

    key = "hidden"

    def __init__(self, folder: Path, device: torch.device):
        model = load_by_transformers("AutoModelForCausalLM", folder, local_files_only=True)
        config: Any = model.config
        super().__init__(folder, load_tokenizer(folder), model.to(device).eval(), config.to_diff_dict())
        self.dimension = config.get_text_config().hidden_size
        self.longest = getattr(config, "max_position_embeddings", None)

    @torch.no_grad()
    def read(self, ids: Tensor, documents: Tensor | None) -> Read:
        """Read a batch, see `ContextReader.read`; `documents` are not isolated."""
        output = self.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        return output.hidden_states[-1], lambda: output.logits


def open_own_reader(name: str | Path, tokenizer: Tokenizer, device: str = "auto") -> OwnReader:
    """Open the frozen model in a folder for another model that reads its neighbours.

    Raises `InputError` if it is not a model of this library, or if its tokenizer is not `tokenizer`.
    """
    reader = open_reader(name, device)
    if not isinstance(reader, OwnReader):
        raise InputError(f"{name}: expected a run or checkpoint of this library")
    if reader.tokenizer.fingerprint != tokenizer.fingerprint:
        raise InputError(f"{name}: has another tokenizer than the model that reads its neighbours")
    return reader


def open_reader(name: str | Path, device: str = "auto") -> ContextReader:
    """Open the model in a folder: a run, or a checkpoint of this library or of transformers.

    Raises `InputError` for other folders.
    """
    folder = checked_path(name)
    if not is_checkpoint(folder):
        return RunReader(Run.open(folder), device)
    if foreign(folder):
        return TransformersReader(folder, choose_device(device))
    checkpoint = Checkpoint(folder, "generate", choose_device(device))
    return OwnReader(folder, checkpoint.tokenizer, checkpoint.model)


def foreign(folder: Path) -> bool:
    """Return whether the folder contains a checkpoint that only transformers can load."""
    if not is_checkpoint(folder) or gguf_file(folder) is not None:
        return False
    saved = read_json(folder / CONFIG, dict)
    try:
        if "model_type" in saved:
            family_of(saved)
    except InputError:
        return True
    return False
