"""Public models beside transformers' own, with the same weights: forward, and a training step.

Texts are full rows of random tokens, or real ones: with `data`, a directory with IMDB's train.tsv[.gz], and
`tokenizer`, each batch holds texts as they come, padded to its longest, so that the share of padding is the
data's own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.bench.machine import begin
from polyformer.bench.timing import in_turn, median
from polyformer.checkpoints import FAMILIES, Family, from_transformers
from polyformer.core.config import Config
from polyformer.core.errors import InputError, unknown
from polyformer.data import DataConfig, read
from polyformer.data.tokenizer_loading import load_tokenizer
from polyformer.presets import model_config
from polyformer.recipes.find import with_data
from polyformer.training.config import at_least

Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamiliesBench(Config):
    """Presets of public families, in turn with transformers; dropout in the training step alone."""

    presets: tuple[str, ...] = ("bert-base",)
    head: str | None = None  # its kind, such as "classify"; by default the preset's
    layers: int | None = None  # of each stack; by default the preset's
    batch: int = 8
    batches: int = 2  # measured together
    length: int = 512  # the most tokens of a row
    data: str | None = None  # by default full rows of random tokens
    tokenizer: str | None = None
    backward: bool = False
    threads: int | None = None
    repeats: int = 3

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, batches=self.batches, length=self.length, repeats=self.repeats)
        if (self.data is None) != (self.tokenizer is None):
            raise InputError("data, tokenizer: expected both, for real texts, or neither, for full rows")
        for name in self.presets:
            if name not in family_of():
                raise unknown("preset of a public family", name, family_of())


def family_of() -> dict[str, Family]:
    """The presets of the families that transformers still has."""
    able = [FAMILIES[name] for name in FAMILIES if not FAMILIES[name].removed]
    return {preset: family for family in able for preset in family.sizes}


def run(config: FamiliesBench) -> dict[str, float]:
    """Ratios, theirs over ours, by "preset pass"; prints the medians and how far the outputs differ."""
    begin(config.threads)
    results: dict[str, float] = {}
    for preset in config.presets:
        try:
            ours, theirs = pair(preset, config)
        except ImportError:
            print("transformers is not installed: no comparison (pip install 'polyformer[peers]')")
            return results
        batches = texts(config, ours.config.vocab_size)
        for batch in batches:
            if ours.encoder is not None and ours.decoder is not None:
                batch["decoder_input_ids"] = batch["input_ids"][:, : max(1, config.length // 4)]
        real = torch.cat([batch["attention_mask"].flatten() for batch in batches]).float().mean().item()
        print(
            f"{preset}: {real:.0%} of the tokens are real, "
            f"outputs differ by {difference(ours, theirs, batches[0]):.1e} at most"
        )
        passes = {"forward": forward} | ({"training step": step} if config.backward else {})
        for name, call in passes.items():
            models = {"transformers": theirs, "polyformer": ours}
            seconds = in_turn({key: call(model, batches) for key, model in models.items()}, config.repeats)
            medians = {key: median(times) for key, times in seconds.items()}
            ratio = medians["transformers"] / medians["polyformer"]
            results[f"{preset} {name}"] = ratio
            shown = ", ".join(f"{key} {time * 1e3:.0f} ms" for key, time in medians.items())
            print(f"{preset} {name}: {shown}: {ratio:.2f} times as fast", flush=True)
    return results


def pair(preset: str, config: FamiliesBench) -> tuple[Any, nn.Module]:
    """The preset with random weights as our model and as theirs."""
    import transformers

    family, model = family_of()[preset], model_config(preset)
    if config.layers is not None:
        model = model.override("num_hidden_layers", config.layers)
    described, task = family.hub_config(model)
    task = task if config.head is None else family.task({}, config.head)
    torch.manual_seed(0)
    hub = transformers.AutoConfig.for_model(**described)
    theirs = getattr(transformers, family.class_prefix + task)(hub)
    return from_transformers(theirs), theirs


def texts(config: FamiliesBench, vocabulary: int) -> list[Batch]:
    """The batches."""
    torch.manual_seed(1)
    if config.data is None or config.tokenizer is None:
        ids = torch.randint(5, min(vocabulary, 1000), (config.batches, config.batch, config.length))
        return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    tokenizer = load_tokenizer(config.tokenizer)
    paths = with_data({"path": "train.tsv"}, config.data)
    rows: Any = read(DataConfig(format="tsv", header=("label", "rating", "text")), ("text",), paths["path"])
    batches = []
    for number in range(config.batches):
        chosen = [rows[number * config.batch + i]["text"] for i in range(config.batch)]
        encoded = [text_ids[: config.length] for text_ids in tokenizer.encode_batch(chosen)]
        longest = max(map(len, encoded))
        mask = torch.stack([(torch.arange(longest) < len(text_ids)).long() for text_ids in encoded])
        ids = torch.zeros_like(mask)
        for row, text_ids in zip(ids, encoded):
            row[: len(text_ids)] = torch.tensor(text_ids).clamp_max(vocabulary - 1)
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def forward(model: nn.Module, batches: list[Batch]) -> Callable[[], None]:
    """One pass over all batches in evaluation."""

    def call() -> None:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                predicted(model(**batch))

    return call


def step(model: nn.Module, batches: list[Batch]) -> Callable[[], None]:
    """One pass in training, and its gradients; the loss is the mean square of what is predicted."""

    def call() -> None:
        model.train()
        for batch in batches:
            model.zero_grad(set_to_none=True)
            predicted(model(**batch)).square().mean().backward()

    return call


def predicted(output: Any) -> Tensor:
    """What a model predicts, or its last hidden states."""
    for name in ("logits", "prediction_logits", "start_logits", "last_hidden_state"):
        prediction = getattr(output, name, None)
        if prediction is not None:
            return prediction
    raise AssertionError("no predictions")


@torch.no_grad()
def difference(ours: nn.Module, theirs: nn.Module, batch: Batch) -> float:
    """The greatest difference at real tokens."""
    mine, other = (predicted(model.eval()(**batch)) for model in (ours, theirs))
    if mine.shape[:2] == batch["attention_mask"].shape:
        real = batch["attention_mask"].bool()
        mine, other = mine[real], other[real]
    return (mine - other).abs().max().item()
