"""A model that a command looks into, and texts for it to read.

The texts are laid end to end and cut into rows of one length, so that no row is padded.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from torch import Tensor

    from polyformer.data import DataConfig, Tokenizer
    from polyformer.model import Transformer

CHARACTERS = 32
"""Of a long text no more is read than so many characters a token: few words are longer."""


@dataclass(frozen=True)
class Subject:
    """What is looked at, and what it reads: `columns` of `data`, the last for the decoder."""

    model: "Transformer"
    tokenizer: "Tokenizer"
    data: "DataConfig"
    columns: tuple[str, ...]


def subject(name: str, path: str | None, device: str) -> Subject:
    """A run, a checkpoint, or a preset with fresh weights, which is said. It reads `path`; by default
    what the run was trained on, else the default text."""
    from polyformer.checkpoints import from_pretrained
    from polyformer.data import DataConfig
    from polyformer.recipes.find import with_data
    from polyformer.recipes.run import RECIPE, Run, choose_device, load_tokenizer

    folder, columns = Path(name), ("text",)
    data = DataConfig()
    if (folder / RECIPE).is_file():
        run = Run.open(folder)
        columns = tuple(one for one in run.recipe.task.needs if one in ("text", "tokens", "source", "target"))
        if not columns:
            raise InputError(
                f"{folder}: a run of the task {quote(run.recipe.task.kind)}, which reads no text"
            )
        model, tokenizer, data = run.model(device), run.tokenizer, run.recipe.data
    elif folder.is_dir():
        model = from_pretrained(folder).to(choose_device(device))
        tokenizer = load_tokenizer(folder)
    else:
        model, tokenizer = fresh(name)
        model = model.to(choose_device(device))
        print(f"{name}: a preset, so its weights are fresh; its tokens are bytes")
    if path is not None:
        data = DataConfig.from_dict(with_data(data.to_dict(), path), "data")
    return Subject(model, tokenizer, data, columns)


def fresh(name: str) -> "tuple[Transformer, Tokenizer]":
    """The preset `name` with weights from seed 0, and bytes as its tokens."""
    import torch

    from polyformer.architecture import ModelConfig
    from polyformer.data import Tokenizer, TokenizerConfig
    from polyformer.presets import create_model, model_config

    config = model_config(name)
    if not isinstance(config, ModelConfig):
        raise InputError(f"{name}: a model of trajectories, which reads no text")
    vocabulary = config.vocab_size
    tokenizer = Tokenizer.build(TokenizerConfig(algorithm="bytes"), [])
    if len(tokenizer) > vocabulary:
        raise InputError(f"{name}: expected a vocabulary of {len(tokenizer)}, for bytes, got {vocabulary}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return create_model(name), tokenizer


def inputs(found: Subject, length: int, number: int) -> "list[dict[str, Tensor]]":
    """What the model takes, for each of at most `number` texts of `length` tokens."""
    import torch

    def rows(column: str) -> list[torch.Tensor]:
        device = next(found.model.parameters()).device
        return [torch.tensor([ids], device=device) for ids in cut(found, column, length, number)]

    first = rows(found.columns[0])
    if found.model.encoder is None or found.model.decoder is None:
        return [{"input_ids": ids} for ids in first]
    second = rows(found.columns[-1]) if len(found.columns) > 1 else first
    return [{"input_ids": one, "decoder_input_ids": other} for one, other in zip(first, second)]


def cut(found: Subject, column: str, length: int, number: int) -> list[list[int]]:
    """Rows of `length` tokens from the texts of a column end to end, each text with the token that ends one;
    every row begins with the token that begins a text."""
    tokenizer = found.tokenizer
    begin = [one for one in (tokenizer.bos_id, tokenizer.cls_id) if one is not None][:1]
    end = [one for one in (tokenizer.eos_id, tokenizer.sep_id) if one is not None][:1]
    step = length - len(begin)
    waiting: list[int] = []
    for text in texts(found, column):
        waiting += tokenizer.encode(text[: CHARACTERS * length * number]) + end
        if len(waiting) >= step * number:
            break
    rows = [begin + waiting[i : i + step] for i in range(0, len(waiting) - step + 1, step)][:number]
    if not rows:
        raise InputError(
            f"--length: the texts have {len(waiting)} tokens in all, too few for {length}; "
            "name others with --data, or a smaller --length"
        )
    return rows


def texts(found: Subject, column: str) -> Iterator[str]:
    """The texts of a column, read as they are needed."""
    from polyformer.data import read

    data = replace(found.data, streaming=True, test_fraction=0.0)
    for row in cast("Iterable[dict[str, Any]]", read(data, (column,), data.path)):
        yield row[column] if isinstance(row[column], str) else " ".join(row[column])
