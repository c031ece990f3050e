"""The claim "adaptive computation time ponders longer on harder inputs" (Graves 2016, section 3; Dehghani
et al. 2019, section 3.1), CPU-sized: a Universal Transformer's encoder evaluates nested lists (ListOps).

Every closing bracket is labelled with the value of what it closes, and harder is what is deeper: a list
waits for those in it. The claim holds where more steps are spent on deeper lists. Beside it runs the same
with the halting bias of 1 that the authors' code begins with: a step halts with a chance of 0.73 then, so
that every token halts after two, where public implementations stay.

Deviations: the paper's measure is bAbI's stories by the facts that an answer needs. Lists are of two
operators and none stands right inside its own, so that none can be evaluated without those in it; positions
are rotations, which learn to find a list's bracket sooner than sinusoids.
"""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from polyformer.bench.claims import write_csv
from polyformer.bench.experiment import UNSHOWN, Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.generated import Generated, trained
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data import listops
from polyformer.depth import recorded_depths
from polyformer.model import Transformer
from polyformer.presets import create_model
from polyformer.training import Batch
from polyformer.training.config import at_least

SLOW, PUBLISHED = "slow start", "published bias"

GROWS, STUCK = 0.5, 0.25
"""Steps: what the deepest lists must get more than the flat ones, and what counts as no difference."""

Found = Mapping[tuple[str, int, int], tuple[float, float]]
"""Mean steps, and the share of right values, of brackets; by start, seed and depth of what they close."""


EXPERIMENT = Experiment(
    quick={
        "seeds": (0,),
        "depth": 2,
        "rows": 2,
        "tested": 3,
        "steps": 2,
        "layers": 3,
        "width": 16,
        "heads": 2,
    },
    claims=(
        Claim(
            name="act",
            says="adaptive computation time ponders longer on harder inputs",
            paper="Graves 2016; Dehghani et al. 2019 (Universal Transformers)",
            section="section 3; section 3.1",
            published="ponder time on bAbI's stories grows with the facts that an answer needs",
            measured="halting steps of the outermost bracket of lists nested 1 to 4 deep",
            scale="one layer of 64 repeated at most 8 times, 3,000 steps, three seeds",
            rule="means over the seeds: steps never fall with depth, and the deepest lists get half "
            "a step more than flat ones",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ACTClaim(Config):
    """Sizes of the runs; a second call goes on with what OUT holds."""

    depth: int = 4  # of the deepest lists
    items: int = 3  # in a list, at most
    nested: float = 0.2  # chance that an item is a list too, where one deep enough is there already
    operators: tuple[str, ...] = ("MIN", "MAX")
    seeds: tuple[int, ...] = (0, 1, 2)
    layers: int = 8  # steps at most
    halting_bias: float = -3.0  # of the slow start
    ponder_loss: float = 0.01
    rows: int = 32  # expressions in a batch
    tested: int = 400  # expressions of each depth
    steps: int = 3000
    width: int = 64
    heads: int = 4
    lr: float = 2e-3
    out: str = "runs/act"

    def __post_init__(self) -> None:
        at_least(1, layers=self.layers, rows=self.rows, tested=self.tested, steps=self.steps)
        at_least(2, depth=self.depth, items=self.items)
        if not set(self.operators) <= set(listops.OPERATORS) or len(set(self.operators)) < 2:
            raise InputError(f"operators: expected two or more of {', '.join(listops.OPERATORS)}")
        if not self.seeds:
            raise InputError("seeds: expected one or more")

    @property
    def starts(self) -> dict[str, float]:
        """Halting biases by name."""
        return {SLOW: self.halting_bias, PUBLISHED: 1.0}


def run(config: ACTClaim) -> Found:
    """Train and measure all; write OUT/act.csv and .png, print a table and the verdict."""
    results: dict[tuple[str, int, int], tuple[float, float]] = {}
    for seed in config.seeds:
        for start in config.starts:
            model = fitted(config, start, seed)
            for depth, figures in measured(config, model).items():
                results[start, seed, depth] = figures
                place = f"{start}, seed {seed}, depth {depth}"
                print(f"{place}: {figures[0]:.2f} steps, {figures[1]:.3f} right", flush=True)
    folder = Path(config.out)
    rows = ((*key, *figures) for key, figures in results.items())
    write_csv(folder / "act.csv", ("start", "seed", "depth", "steps", "right"), rows)
    depths = range(1, config.depth + 1)
    curves = {start: [(d, mean(results, start, d)[0]) for d in depths] for start in config.starts}
    line_plot(folder / "act.png", curves, "depth of the list", "steps of its closing bracket")
    print("\n".join(table(results)))
    print(f"curves: {folder / 'act.png'}")
    conclude(EXPERIMENT, config, [verdict(results)])
    return results


def fitted(config: ACTClaim, start: str, seed: int) -> Transformer:
    """The model trained, in a folder of OUT."""
    torch.manual_seed(seed)
    bias = config.starts[start]
    model = create(config, bias)
    settings = dataclasses.replace(config, halting_bias=bias, seeds=(seed,), tested=1, out="")
    folder = Path(config.out) / f"{start.replace(' ', '-')}-{seed}"
    batches = Generated(lambda generator: drawn(config, config.rows, generator)[0], seed)
    trained(model, batches, config.steps, config.lr, settings, folder)
    return model


def create(config: ACTClaim, bias: float) -> Transformer:
    """An encoder of one layer repeated, with fresh weights."""
    return create_model(
        "encoder-tiny",
        num_hidden_layers=config.layers,
        num_hidden_groups=1,
        hidden_size=config.width,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.width,
        vocab_size=listops.VOCABULARY,
        block="post",
        position="rope",
        dropout=0.0,
        initializer_range=None,
        embedding={"scaled": True},
        head={"kind": "tag", "num_labels": 10, "dropout": 0.0},
        depth={"kind": "act", "ponder_loss": config.ponder_loss, "halting_bias": bias},
    )


def drawn(
    config: ACTClaim, rows: int, generator: torch.Generator, depth: int | None = None
) -> tuple[Batch, Tensor]:
    """Expressions of this depth, by default of any, and the depths [B, T] of what their brackets close."""
    draw = random.Random(int(torch.randint(1 << 40, (), generator=generator)))
    rules = listops.ListOps(config.operators, config.items, config.nested)
    texts = [rules.expression(depth or draw.randint(1, config.depth), draw) for _ in range(rows)]
    longest = max(len(text.ids) for text in texts)

    def padded(numbers: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([row + [filler] * (longest - len(row)) for row in numbers])

    ids = padded([text.ids for text in texts], listops.PAD)
    labels = padded([text.values for text in texts], -100)
    mask = (ids != listops.PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, padded([t.depths for t in texts], 0)


@torch.no_grad()
def measured(config: ACTClaim, model: Transformer) -> dict[int, tuple[float, float]]:
    """Mean steps and share of right values by depth, over the outermost brackets of the same expressions."""
    results = {}
    for depth in range(1, config.depth + 1):
        batch, depths = drawn(config, config.tested, torch.Generator().manual_seed(depth), depth)
        with recorded_depths() as steps:
            right = model(**batch).logits.argmax(-1) == batch["labels"]
        outermost = depths == depth
        results[depth] = float(steps[0][outermost].float().mean()), float(right[outermost].float().mean())
    return results


def mean(results: Found, start: str, depth: int) -> tuple[float, float]:
    """Steps and share of right values, over the seeds."""
    steps, right = zip(*(figures for key, figures in results.items() if key[::2] == (start, depth)))
    return statistics.mean(steps), statistics.mean(right)


def table(results: Found) -> list[str]:
    """Lines of text: two rows for each start, a column for each depth."""
    depths = sorted({key[2] for key in results})
    lines = [f"{'steps':<24}" + "".join(f"{f'depth {d}':>10}" for d in depths)]
    for start in dict.fromkeys(key[0] for key in results):
        for place, name in enumerate((start, f"{start}, right")):
            lines.append(f"{name:<24}" + "".join(f"{mean(results, start, d)[place]:>10.2f}" for d in depths))
    return lines


def verdict(results: Found) -> Verdict:
    """What the means over the seeds say of the claim, and of the published start."""
    starts, depths = {key[0] for key in results}, sorted({key[2] for key in results})
    if starts != {SLOW, PUBLISHED}:
        return Verdict(UNSHOWN, "no verdict: it needs both starts")
    steps = {start: [mean(results, start, depth)[0] for depth in depths] for start in (SLOW, PUBLISHED)}
    slow, published = steps[SLOW], steps[PUBLISHED]
    differs = []
    if any(deeper < flatter for flatter, deeper in itertools.pairwise(slow)):
        differs.append("a deeper list gets fewer steps")
    if slow[-1] - slow[0] < GROWS:
        differs.append("the deepest do not get more")
    outcome = f"differs from the paper: {'; '.join(differs)}" if differs else "reproduced"
    spread = max(published) - min(published)
    stuck = "stays where it began" if spread < STUCK else f"differs by {spread:.2f} steps"
    cells = ", ".join(f"{number:.2f}" for number in slow)
    return verdict_of(
        not differs,
        f"more steps for what is harder: {outcome} (steps from depth {depths[0]} to {depths[-1]}: {cells}; "
        f"with a halting bias of 1 {', '.join(f'{number:.2f}' for number in published)}: {stuck})",
    )
