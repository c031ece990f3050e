"""The claims of `memorizing` on a checkpoint that has long learnt to look back (Wu et al. 2022, section 4,
table 4, figures 1 and 6): a store lowers its perplexity, more so the larger it is, and a little fine-tuning
teaches it to.

The checkpoint reads a text in segments without a memory. One layer near the top is given a store
(`polyformer convert`), and what `trains` names learns for `steps` segments of the training text; all else is
frozen. The first held-out tokens are then read with stores of every size, and, without one, in segments and
with the context `dense`: the first is where fine-tuning begins, the second what a memory is to make up for.
Where weights of the checkpoint learn too, these two are of a model that was trained for as many steps without
a store. The rule: perplexity falls as the store grows to what training had, ends below the model without, and
half of the way to the dense context is gone.

Deviations: some hundred steps of one segment each, in place of 20,000 of some hundred documents; most weights
frozen; the whole text is one document (in training, 256 Ki characters are).
"""

import dataclasses
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from polyformer.bench.claims import KeptFigures, recipe_from_checkpoint, taken_up
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.bench.remembering import first_tokens
from polyformer.bench.reproduce.memorizing import RISES, Measured, table, write_measured
from polyformer.checkpoints import convert, from_pretrained
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.labels import IGNORED
from polyformer.memory.memorizing import Trains, set_store
from polyformer.model import Transformer
from polyformer.recipes import Recipe
from polyformer.tasks import LanguageModelling
from polyformer.tasks.metrics import exp
from polyformer.training.config import at_least

CLOSED_HALF = 0.5
"""At least such a share of the gap between segments and the dense context must be closed."""

CONVERTED, TUNED, WITHOUT, DENSE = "as converted", "fine-tuned", "without a store", "dense"


EXPERIMENT = Experiment(
    sources={"data": "wikitext2", "model": "decoder"},
    quick={
        "length": 16,
        "dense": 32,
        "store": 32,
        "neighbours": 2,
        "stores": (0, 32),
        "held_out": 64,
        "steps": 1,
    },
    claims=(
        Claim(
            name="memorizing-pretrained-store",
            says="a store lowers the perplexity of a checkpoint, more so the larger it is",
            paper="Wu et al. 2022 (Memorizing Transformers)",
            section="section 4, table 4, figure 1",
            published="perplexity falls up to stores of 262K tokens",
            measured="perplexity by the store's entries in evaluation",
            scale="SmolLM2-135M, layer 19, 18 numbers trained on 64 segments of 512 tokens of WikiText-2",
            rule="it does not rise by more than 1 % from store to store, falls, and ends below the "
            "model without",
        ),
        Claim(
            name="memorizing-pretrained-gap",
            says="a store makes up for a longer context",
            paper="Wu et al. 2022 (Memorizing Transformers)",
            section="section 4, table 4, figure 6",
            published="a model with a store of 8K is as good as one of five times the parameters without",
            measured="share of the gap between segments of 512 and a context of 2,048 that the store closes",
            scale="SmolLM2-135M, layer 19, 18 numbers trained on 64 segments of 512 tokens of WikiText-2",
            rule="half of it or more",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainedClaim(Config):
    """The checkpoint, the text, and sizes; a second call goes on with what OUT holds.

    data: a directory with WikiText-2's {train,valid}.txt[.gz], or the file of a book; by default the default
    text. layer: by default that at three fourths of the depth.
    """

    model: str  # the folder of a run or checkpoint that writes
    data: str | None = None
    layer: int | None = None
    length: int = 512  # tokens in a segment
    dense: int = 2048  # tokens in the context that the store is compared with
    store: int = 8192  # entries, while training
    neighbours: int = 32
    stores: tuple[int, ...] = (0, 512, 2048, 8192, 32_768)  # entries, in evaluation
    held_out: int = 16_384  # tokens
    steps: int = 64
    trains: Trains = "memory"
    sinks: int = 1  # tokens at the start of every segment that are not stored
    gate: float = -1.0  # with which every head begins, before the sigmoid
    lr: float = 1e-2
    precision: Literal["no", "bf16"] = "no"
    seed: int = 0
    out: str = "runs/memorizing-pretrained"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, store=self.store, neighbours=self.neighbours)
        at_least(2, length=self.length, held_out=self.held_out)
        at_least(self.length, dense=self.dense)
        if self.store not in self.stores or 0 not in self.stores or min(self.stores) < 0:
            raise InputError(f"stores: expected 0, {self.store} and others, got {list(self.stores)}")

    def memory(self, store: int) -> str:
        """The memory as recipes name it."""
        options = {
            "length": 0,
            "store": store,
            "neighbours": self.neighbours,
            "layer": self.layer,
            "gate": self.gate,
            "sinks": self.sinks,
            "trains": self.trains,
        }
        return f"memorizing({', '.join(f'{k}={v}' for k, v in options.items() if v is not None)})"


def run(config: PretrainedClaim) -> Measured:
    """Train and measure all; write OUT/memorizing.csv and .png, print a table and the verdict."""
    folder = Path(config.out)
    texts = first_tokens(config.data, folder, config.steps * config.length, config.held_out)
    begun = folder / "converted"
    if not begun.is_dir():
        model, report = convert(from_pretrained(config.model), memory=config.memory(config.store))
        model.save_pretrained(begun)
        print(report)
    figures = Figures(config, folder / "figures.json")
    tuned = taken_up(Recipe.from_dict(recipe(config, texts["path"], begun)), folder / "tuned")
    assert isinstance(tuned.task, LanguageModelling)
    ids = held_out(config, tuned.task, texts["validation"])
    for size in config.stores:
        figures.measure(TUNED, size, tuned.model, ids, config.length)
    figures.measure(CONVERTED, config.store, Transformer.from_pretrained(begun), ids, config.length)
    if config.trains == "memory":  # without a store it is the checkpoint
        without = tuned.model
        figures.values[WITHOUT] = {0: figures.values[TUNED][0]}
    else:
        settings = recipe(config, texts["path"], begun, config.memory(0))
        without = taken_up(Recipe.from_dict(settings), folder / "without").model
        figures.measure(WITHOUT, 0, without, ids, config.length)
    figures.measure(DENSE, 0, without, ids, config.dense)
    results = figures.values
    write_measured(folder, results)
    print("\n".join(table(results)))
    curves = {
        name: [(max(size, 256), results[name].get(size, results[name].get(0, 0.0))) for size in config.stores]
        for name in (TUNED, WITHOUT, DENSE)
    }
    line_plot(folder / "memorizing.png", curves, "entries in the store (256: none)", "perplexity", log=True)
    print(f"curves: {folder / 'memorizing.png'}")
    conclude(EXPERIMENT, config, verdicts(config, results))
    return results


def recipe(config: PretrainedClaim, text: str, start: Path, memory: str | None = None) -> dict[str, Any]:
    """A run over the text in order, from the checkpoint `start`, with its own memory or another."""
    names = "steps", "lr", "precision", "seed"
    sizes = {"row_length": config.length, **{name: getattr(config, name) for name in names}}
    run = recipe_from_checkpoint(start, config.model, text, feed="in_order", **sizes)
    return run if memory is None else {**run, "model": {**run["model"], "memory": memory}}


def held_out(config: PretrainedClaim, task: LanguageModelling, file: str) -> Tensor:
    """The first tokens of the held-out text [1, n + 1], of which n are predicted."""
    ids = task.documents([{"text": Path(file).read_text(encoding="utf-8")}])[0][:-1]
    return torch.tensor([ids[: config.held_out + 1]])


class Figures:
    """Perplexities by decoder and size of its store, kept in a file as they are measured.

    Raises `InputError` for a file of other settings.
    """

    def __init__(self, config: PretrainedClaim, file: Path):
        self.config = config
        self.kept = KeptFigures(file, {**config.to_dict(), "out": None, "stores": None})
        stored = self.kept.stored.get("perplexity", {}).items()
        self.values = {name: {int(k): x for k, x in sizes.items()} for name, sizes in stored}

    def measure(self, name: str, size: int, model: Transformer, ids: Tensor, length: int) -> None:
        """Read the tokens in segments of `length` with a store of this size, unless that was done."""
        sizes = self.values.setdefault(name, {})
        if size not in sizes:
            set_store(model, size)
            sizes[size] = perplexity(model, ids, length, self.config.precision)
            self.kept.write(perplexity=self.values)
        print(f"{name}, store of {size}, segments of {length}: perplexity {sizes[size]:.3f}", flush=True)


@torch.no_grad()
def perplexity(model: Transformer, ids: Tensor, length: int, precision: str = "no") -> float:
    """Per token of ids [1, n + 1], read in segments, each after the state that the one before it left."""
    device, state, nats = next(model.parameters()).device, None, 0.0
    model.eval()
    halves = torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    goals = ids[:, 1:]
    for segment, following in zip(ids[:, :-1].split(length, 1), goals.split(length, 1)):
        with halves:
            labels = following.to(device)
            output = model(segment.to(device), shift_labels=labels, state=state, use_cache=True)
        assert output.loss is not None
        nats += float(output.loss) * int((following != IGNORED).sum())
        state = output.state
    return exp(nats / goals.numel())


def verdicts(config: PretrainedClaim, results: Measured) -> list[Verdict]:
    """What the figures say of both claims."""
    curve, plain, dense = results[TUNED], results[WITHOUT][0], results[DENSE][0]
    within = sorted(size for size in curve if size <= config.store)
    differs = []
    if any(curve[more] > RISES * curve[less] for less, more in itertools.pairwise(within)):
        differs.append("perplexity rises as the store grows")
    if curve[config.store] >= curve[0]:
        differs.append("it does not fall")
    if curve[config.store] >= plain:
        differs.append("the model without is as good")
    outcome = f"differs from the paper: {'; '.join(differs)}" if differs else "reproduced"
    gap, won = plain - dense, plain - curve[config.store]
    share = won / gap if gap > 0 else float("nan")
    closed = "reproduced" if share >= CLOSED_HALF else "differs from the paper"
    stored = f"{curve[config.store]:.2f} with {config.store} entries"
    larger = (
        f"a larger store lowers perplexity: {outcome} ({curve[0]:.2f} with none, {stored}, "
        f"best {min(curve.values()):.2f}; without {plain:.2f})"
    )
    closing = (
        f"fine-tuning closes the gap to a context of {config.dense}: {closed} "
        f"({share:.0%} of it: {plain:.2f} without, {stored}, dense {dense:.2f})"
    )
    return [verdict_of(not differs, larger), verdict_of(share >= CLOSED_HALF, closing)]
