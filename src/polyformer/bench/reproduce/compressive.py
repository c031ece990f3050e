"""The claim that compressing what leaves a memory lowers perplexity beside a memory of as many vectors
(Rae et al. 2020, section 5: Compressive Transformer against Transformer-XL), CPU-sized.

Two decoders of one size read the same text in order for as many steps, with states of one size: the last
`memory` + `compressed` tokens of each layer, or the last `memory` tokens and before them `compressed` vectors
of `rate` tokens each. Then each reads the held-out text with the memory it was trained with. The compressive
one must have the lower perplexity with every seed.

Deviations: a book in place of PG-19's thousands, segments of a sixteenth of theirs, a model a thousand times
smaller. Compression is the paper's best, a convolution that learns by the attention's reconstruction; its
operations are not counted, as in the paper.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from polyformer.bench.claims import TINY, taken_up, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.bench.remembering import InOrderClaim, perplexity, recipe_in_order, remembered_text
from polyformer.core.errors import InputError
from polyformer.recipes import Recipe
from polyformer.training.config import at_least
from polyformer.training.metrics import read_metrics

RECENT, COMPRESSIVE = "Transformer-XL", "Compressive"

Measured = Mapping[str, Mapping[int, float]]
"""Perplexity by kind of memory and seed."""


EXPERIMENT = Experiment(
    sources={"data": "book"},
    quick={
        **TINY,
        "length": 8,
        "memory": 8,
        "compressed": 4,
        "rate": 2,
        "held_out": 200,
        "seeds": (0,),
    },
    claims=(
        Claim(
            name="compressive",
            says="compressing what leaves a memory lowers perplexity beside a memory of as many vectors",
            paper="Rae et al. 2020 (Compressive Transformer)",
            section="section 5",
            published="PG-19: test perplexity 33.6 beside Transformer-XL's 36.3",
            measured="perplexity of two decoders with states of one size, a memory of 64 or 32 and 32 "
            "compressed",
            scale="a book, 3 layers of 96, segments of 32, 1,000 steps, three seeds",
            rule="the compressive one has the lower perplexity with every seed",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressiveClaim(InOrderClaim):
    """Sizes of the runs; a second call goes on with what OUT holds."""

    memory: int = 32  # tokens in the compressive one's recent memory
    compressed: int = 32  # vectors in its compressed memory
    rate: int = 3  # tokens a vector
    steps: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2)
    out: str = "runs/compressive"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, steps=self.steps)
        if not self.seeds:
            raise InputError("seeds: expected a number or more, got none")
        self.memories()

    def memories(self) -> dict[str, str]:
        """Both memories as recipes name them."""
        sizes = f"length={self.memory}, compressed_length={self.compressed}, rate={self.rate}"
        return {
            RECENT: f"recurrent(length={self.memory + self.compressed})",
            COMPRESSIVE: f"compressive({sizes})",
        }


def run(config: CompressiveClaim) -> Measured:
    """Train and measure both with every seed; write OUT/compressive.csv and .png, print table and verdict."""
    folder = Path(config.out)
    data = remembered_text(config.data, folder)
    results: dict[str, dict[int, float]] = {name: {} for name in config.memories()}
    curves: dict[str, list[tuple[float, float]]] = {}
    for seed in config.seeds:
        for name, memory in config.memories().items():
            settings = recipe_in_order(config, data, memory, config.length, config.steps, seed)
            place = folder / f"{name.lower()}-{seed}"
            fitted = taken_up(Recipe.from_dict(settings), place)
            results[name][seed] = perplexity(fitted, config.held_out)
            print(f"{name}, seed {seed}: perplexity {results[name][seed]:.3f}", flush=True)
            curves[f"{name}, seed {seed}"] = [
                (step, loss)
                for row in read_metrics(place)
                if (step := row["step"]) is not None and (loss := row.get("loss")) is not None
            ]
    rows = ((name, *pair) for name, seeds in results.items() for pair in seeds.items())
    write_csv(folder / "compressive.csv", ("memory", "seed", "perplexity"), rows)
    print("\n".join(table(results)))
    line_plot(folder / "compressive.png", curves, "steps", "training loss")
    print(f"curves: {folder / 'compressive.png'}")
    conclude(EXPERIMENT, config, [verdict(results)])
    return results


def table(results: Measured) -> list[str]:
    """Lines of text: a row for each memory, a column for each seed, and their mean."""
    seeds = list(results[RECENT])
    lines = [f"{'memory':<16}" + "".join(f"{f'seed {seed}':>10}" for seed in seeds) + f"{'mean':>10}"]
    for name, values in results.items():
        numbers = [*values.values(), mean(values.values())]
        lines.append(f"{name:<16}" + "".join(f"{value:>10.3f}" for value in numbers))
    return lines


def verdict(results: Measured) -> Verdict:
    """What the figures say of the claim."""
    recent, compressive = results[RECENT], results[COMPRESSIVE]
    lower = sum(compressive[seed] < recent[seed] for seed in recent)
    outcome = "reproduced" if lower == len(recent) else "differs from the paper"
    means = f"{mean(compressive.values()):.2f} beside {mean(recent.values()):.2f} on average"
    return verdict_of(
        lower == len(recent),
        f"a compressed memory lowers perplexity at equal state: {outcome} (with {lower} of {len(recent)} "
        f"seeds; {means})",
    )
