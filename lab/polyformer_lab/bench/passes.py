"""Our models and transformers' models with the same weights: their agreement and their speed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import FAMILIES, Family, from_transformers
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer_lab.bench.rows import OURS, AbsentError, Case

Batch = dict[str, Tensor]
Read = Callable[[Any], Tensor]
"""A function from a model's output to the tensor that is compared and trained."""

TRANSFORMERS = "transformers"
PASSES = "forward", "forward and backward"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model in our version, and in the version of transformers if it is installed."""

    ours: Any
    theirs: Any = None

    @classmethod
    def of(cls, family: Family, config: ModelConfig, head: str | None = None, **place: Any) -> "Pair":
        """Return a model of a family with random weights; `head`: its kind, if it differs from `config`."""
        torch.manual_seed(0)
        try:
            import transformers
        except ImportError:
            return cls(Transformer(config).to(**place))
        task = family.task({}, head or config.head)
        described, _ = family.hub_config(dataclasses.replace(config, head=family.tasks[task].head))
        hub = transformers.AutoConfig.for_model(**described)
        theirs = getattr(transformers, family.class_prefix + task)(hub)
        return cls(from_transformers(theirs).to(**place), theirs.to(**place))

    def transformers_model(self) -> Any:
        """Return the model of transformers; raises `AbsentError` without transformers."""
        if self.theirs is None:
            raise AbsentError("transformers is not installed (pip install 'polyformer[peers]')")
        return self.theirs

    @property
    def makers(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Return the functions that make both models, by name."""
        return {TRANSFORMERS: self.transformers_model, OURS: lambda: self.ours}


def gpt2_pair(bench: Any, positions: int, dropout: float = 0.0, **place: Any) -> Pair:
    """Return both models of GPT-2's shape with random weights.

    bench: has the numbers `layers`, `hidden_size`, `heads` and `vocab_size`. place: as `Module.to` takes it.
    """
    sizes = {
        "num_hidden_layers": bench.layers,
        "hidden_size": bench.hidden_size,
        "intermediate_size": 4 * bench.hidden_size,
        "num_attention_heads": bench.heads,
        "vocab_size": bench.vocab_size,
        "dropout": dropout,
        "max_position_embeddings": positions,
    }
    return Pair.of(FAMILIES["gpt2"], model_config("gpt2", sizes), **place)


def predicted(output: Any) -> Tensor:
    """Return a model's predictions, or its last hidden states."""
    for name in ("logits", "prediction_logits", "start_logits", "last_hidden_state"):
        prediction = getattr(output, name, None)
        if prediction is not None:
            return prediction
    raise AssertionError("no predictions")


@torch.no_grad()
def agreement(pair: Pair, batch: Batch, read: Read = predicted) -> dict[str, float]:
    """Return the largest difference of outputs at real tokens, and the share that agrees to 1e-3."""
    mine, other = (read(make()(**batch)) for make in pair.makers.values())
    mask = batch.get("attention_mask")
    if mask is not None and mine.shape[:2] == mask.shape:
        mine, other = mine[mask.bool()], other[mask.bool()]
    difference = (mine - other).abs().amax(-1)
    return {"differs by": difference.max().item(), "agrees": (difference < 1e-3).float().mean().item()}


def cases(
    pair: Pair,
    batches: Sequence[Batch],
    passes: Sequence[str],
    agree: Callable[[], dict[str, float]] | None = None,
    read: Read = predicted,
) -> Iterator[Case]:
    """Yield the passes over the batches; `agree`: the agreement of transformers' outputs with ours."""

    def call(make: Callable[[], nn.Module], backward: bool) -> Callable[[], None]:
        model = make()

        def run() -> None:
            model.train(backward)
            with torch.set_grad_enabled(backward):
                for batch in batches:
                    output = read(model(**batch))
                    if backward:
                        model.zero_grad(set_to_none=True)
                        output.square().mean().backward()

        return run

    tokens = sum(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum() for batch in batches)
    for name in passes:
        contenders = {
            key: functools.partial(call, make, name != PASSES[0]) for key, make in pair.makers.items()
        }
        facts = {TRANSFORMERS: agree} if agree is not None and name == passes[0] else {}
        yield Case(contenders, name, work={"tokens": float(tokens)}, facts=facts)
