"""Reading of a text with a causal model: windows of its tokens, their keys, and the model's own logits.

Each token of a text except the first is the target of exactly one window.

    window n reads the tokens [n f - context, n f + f) and predicts [n f + 1, n f + f + 1)
    f = length - context

So entry i of a text has token i as context and token i + 1 as value, regardless of the process that reads it
and of interruptions.

A store knows its model by a fingerprint: a digest of configuration and weights, independent of the files.
`cached_log_p` reads a text through KV caches with a policy instead.
"""

import abc
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import read_json
from polyformer.core.foreign_checkpoints import gguf_file, load_by_transformers
from polyformer.core.modules import evaluating
from polyformer.core.paths import checked_path
from polyformer.core.ranges import PositiveInt
from polyformer.data import Tokenizer, load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.pretrained import CONFIG
from polyformer.models.checkpoints.load import family_of
from polyformer.models.config import max_positions
from polyformer.nn.cache import CachePolicy
from polyformer.nn.stack.last_feedforward import LastFeedForwardInput
from polyformer.training.machine import choose_device
from polyformer.training.recipes.reader import Reader as Checkpoint
from polyformer.training.recipes.run import Run, is_checkpoint
from polyformer.training.tasks import LanguageModelling

WHOLE = 1 << 30
"""Models up to this many bytes are read completely, of larger models only evenly spaced runs of each tensor.
"""

RUNS, RUN = 64, 1 << 14


def model_fingerprint(model: nn.Module, config: object) -> str:
    """Return the SHA-256 of the configuration and of every tensor with its name.

    It does not depend on the files that store the model. Of a model larger than `WHOLE` bytes only samples of
    its tensors are read: any training changes all of them.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    tensors = dict(sorted(model.state_dict().items()))
    whole = sum(tensor.nbytes for tensor in tensors.values() if isinstance(tensor, Tensor)) <= WHOLE
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            update(digest, tensor.detach(), whole)
    return digest.hexdigest()


def changed_settings(config: Any) -> Any:
    """Return a configuration as plain data, without the fields that have their default value.

    So an option that a later version adds does not change the fingerprint unless it is set.
    """
    if not dataclasses.is_dataclass(config):
        return config
    values = {
        field.name: (getattr(config, field.name), default(field)) for field in dataclasses.fields(config)
    }
    kept = {name: changed_settings(value) for name, (value, usual) in values.items() if value != usual}
    return {"kind": getattr(config, "kind", ""), **kept}


def default(field: "dataclasses.Field[Any]") -> Any:
    """Return the default value of a field; `MISSING` if it is required."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def update(digest: "hashlib._Hash", tensor: Tensor, whole: bool) -> None:
    """Update `digest` with a tensor's bytes: all of them, or `RUNS` runs of `RUN` bytes."""
    flat = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor
    if whole or flat.numel() <= RUNS * RUN:
        digest.update(flat.cpu().numpy().tobytes() if tensor.numel() else b"")
        return
    step = (flat.numel() - RUN) // (RUNS - 1)
    for start in range(0, RUNS * step, step):
        digest.update(flat[start : start + RUN].cpu().numpy().tobytes())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading(Config):
    """Options of the windows. isolated: documents cannot attend to each other, as our models are trained."""

    length: PositiveInt = 512  # tokens per window
    context: int = 0  # tokens that the previous window contains too
    isolated: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.context < self.length:
            raise InputError(
                f"context: expected 0 to {self.length - 1} tokens of a length of {self.length}, "
                f"got {self.context}"
            )

    @property
    def fresh(self) -> int:
        """Return the number of targets per window."""
        return self.length - self.context


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """A window of tokens."""

    number: int
    ids: np.ndarray  # [T + 1], the input tokens and one more target
    documents: np.ndarray  # [T + 1], the document of each token
    carried: int  # the number of tokens that serve only as context

    @property
    def entries(self) -> int:
        """Return the number of targets."""
        return len(self.ids) - 1 - self.carried


def windows(documents: Iterable[Sequence[int]], reading: Reading) -> Iterator[Window]:
    """Yield all windows of a text in order, lazily; the last may be shorter."""
    ids, owners = np.empty(0, np.int32), np.empty(0, np.int32)
    carried = number = 0
    for index, document in enumerate(documents):
        ids = np.concatenate([ids, np.asarray(document, np.int32)])
        owners = np.concatenate([owners, np.full(len(document), index, np.int32)])
        while len(ids) > (end := carried + reading.fresh):
            yield Window(number, ids[: end + 1], owners[: end + 1], carried)
            carried, number = min(reading.context, end), number + 1
            ids, owners = ids[end - carried :], owners[end - carried :]
    if len(ids) > carried + 1:
        yield Window(number, ids, owners, carried)


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
        return self.task.rows.documents([{"text": text} for text in texts])


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


def cache_policy(reader: ContextReader, text: str, option: str) -> CachePolicy:
    """Return the policy `text` of `option`; raises `InputError` if the reader's model has no such caches."""
    if not isinstance(reader, OwnReader):
        raise InputError(
            f"{option}: not available for {reader.folder}, which transformers runs; leave it out"
        )
    policy = CachePolicy.from_dict(text, "cache")
    reader.model.new_state(cache=policy)  # refuses a model without such caches
    return policy


@torch.no_grad()
def cached_log_p(reader: ContextReader, window: Window, policy: CachePolicy) -> Tensor:
    """Return log p of the targets [n] of a window; the context before them is the prompt, and a call."""
    model, ids = reader.model, torch.from_numpy(window.ids.astype(np.int64)).unsqueeze(0)
    ids = ids.to(next(model.parameters()).device)
    state = model.new_state(cache=policy)
    with evaluating(model):
        if window.carried:
            state = model(ids[:, : window.carried], state=state).state
        logits = model(ids[:, window.carried : -1], state=state).logits[0]
    targets = ids[0, window.carried + 1 :].unsqueeze(1)
    return logits.float().log_softmax(-1).gather(1, targets).squeeze(1).cpu()
