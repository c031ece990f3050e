"""Load a model from a run, a checkpoint or a preset, with texts of one length.

The texts are concatenated and cut into rows of one length, so that no row is padded.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from torch import Tensor

    from polyformer.data import DataConfig, Tokenizer
    from polyformer.models.architectures import Transformer

CHARACTERS = 32
"""Characters of a long text to read per required token; few tokens are longer."""


@dataclass(frozen=True)
class ModelAndTexts:
    """A model and its texts: `columns` of `data`, the last column for the decoder."""

    model: "Transformer"
    tokenizer: "Tokenizer"
    data: "DataConfig"
    columns: tuple[str, ...]


def load(name: str, path: str | None, device: str, overrides: dict[str, Any] | None = None) -> ModelAndTexts:
    """Load a run, a checkpoint, or a preset with `overrides` and random weights, with the texts in `path`.

    The default texts are the run's training data, or the default text.
    """
    from polyformer.data import DataConfig
    from polyformer.data.tokenizers.loading import load_tokenizer
    from polyformer.models.architectures.pretrained import RECIPE
    from polyformer.training.machine import choose_device
    from polyformer.training.recipes.recipe import with_data
    from polyformer.training.recipes.run import Run, is_checkpoint, open_model

    folder, columns = Path(name), ("text",)
    data = DataConfig()
    if (folder / RECIPE).is_file():
        run = Run.open(folder)
        needs = run.recipe.task.needs
        columns = tuple(column for column in needs if column in ("text", "tokens", "source", "target"))
        if not columns:
            raise InputError(f"{folder}: the task {quote(run.recipe.task.kind)} of this run reads no text")
        model, tokenizer, data = run.model(device), run.tokenizer, run.recipe.data
    elif is_checkpoint(folder):
        model = open_model(folder, device)
        tokenizer = load_tokenizer(folder)
    else:
        model, tokenizer = random_preset(name, overrides or {})
        model = model.to(choose_device(device))
        print(f"{name}: preset with random weights; its tokens are bytes")
    if path is not None:
        data = DataConfig.from_dict(with_data(data.to_dict(), path), "data")
    return ModelAndTexts(model, tokenizer, data, columns)


def random_preset(name: str, overrides: dict[str, Any]) -> "tuple[Transformer, Tokenizer]":
    """Return the preset `name` with `overrides`, random weights (seed 0), and a byte tokenizer."""
    import torch

    from polyformer.data import TokenizerConfig, build_tokenizer
    from polyformer.models.config import ModelConfig
    from polyformer.models.presets import create_model, model_config

    config = model_config(name, overrides)
    if not isinstance(config, ModelConfig):
        raise InputError(f"{name}: this model reads no text")
    vocabulary = config.vocab_size
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="bytes"), [])
    if len(tokenizer) > vocabulary:
        raise InputError(
            f"{name}: expected a vocabulary of {len(tokenizer)} or more for bytes, got {vocabulary}"
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return create_model(name, **overrides), tokenizer


def model_inputs(source: ModelAndTexts, length: int, number: int) -> "list[dict[str, Tensor]]":
    """Return the model inputs of at most `number` texts of `length` tokens."""
    import torch

    def rows(column: str) -> list[torch.Tensor]:
        device = next(source.model.parameters()).device
        return [torch.tensor([ids], device=device) for ids in token_rows(source, column, length, number)]

    inputs = rows(source.columns[0])
    if source.model.encoder is None or source.model.decoder is None:
        return [{"input_ids": ids} for ids in inputs]
    targets = rows(source.columns[-1]) if len(source.columns) > 1 else inputs
    return [{"input_ids": ids, "decoder_input_ids": target} for ids, target in zip(inputs, targets)]


def token_rows(source: ModelAndTexts, column: str, length: int, number: int) -> list[list[int]]:
    """Return at most `number` rows of `length` tokens from the concatenated texts of a column.

    If the tokenizer has these tokens, each text ends with <eos> or <sep>, and each row begins with <bos> or
    <cls>.
    """
    tokenizer = source.tokenizer
    begin = [token for token in (tokenizer.bos_id, tokenizer.cls_id) if token is not None][:1]
    end = [token for token in (tokenizer.eos_id, tokenizer.sep_id) if token is not None][:1]
    step = length - len(begin)
    tokens: list[int] = []
    for text in texts(source, column):
        tokens += tokenizer.encode(text[: CHARACTERS * length * number]) + end
        if len(tokens) >= step * number:
            break
    rows = [begin + tokens[i : i + step] for i in range(0, len(tokens) - step + 1, step)][:number]
    if not rows:
        raise InputError(
            f"--length: the texts have {len(tokens)} tokens in total, too few for {length}; "
            "use more text (--data) or a smaller --length"
        )
    return rows


def texts(source: ModelAndTexts, column: str) -> Iterator[str]:
    """Yield the texts of a column lazily."""
    from polyformer.data import read

    data = replace(source.data, streaming=True, test_fraction=0.0)
    for row in cast("Iterable[dict[str, Any]]", read(data, (column,), data.path)):
        yield row[column] if isinstance(row[column], str) else " ".join(row[column])
