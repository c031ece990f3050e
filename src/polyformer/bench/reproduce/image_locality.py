"""The claim "a pixel is predicted from those around it" (Parmar et al. 2018, section 4.2), CPU-sized.

Three equal models of the same images, which see all earlier pixels, blocks of the raster (1D) or blocks of
the image (2D), at an equal budget. The claim holds where the local ones come near the dense one in bits per
dimension; the table also says how many keys a pixel has and what a step takes.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from torch import Tensor

from polyformer.bench.claims import decoder_options, fields_of, taken_up, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.core.config import Config
from polyformer.data import DataConfig, read
from polyformer.patterns import Full, Local1D, Local2D, Pattern
from polyformer.patterns.implied import Causal
from polyformer.patterns.layout import count
from polyformer.recipes import Recipe
from polyformer.recipes.fit import Fitted
from polyformer.recipes.sheet import IMAGES, write_pictures
from polyformer.sequence.context import Context
from polyformer.tasks import ImageConfig, ImageModelling
from polyformer.training.config import at_least
from polyformer.training.metrics import read_metrics

ALIKE = 0.03
"""Bits per dimension that the local models may lie above the dense one."""


EXPERIMENT = Experiment(
    quick={"steps": 2, "images": 4, "layers": 1, "width": 16, "heads": 2},
    claims=(
        Claim(
            name="image-locality",
            says="a pixel is predicted from those around it",
            paper="Parmar et al. 2018 (Image Transformer)",
            section="section 4.2",
            published="CIFAR-10 and ImageNet: 1D and 2D local attention reach or improve the state of the "
            "art in bits per dimension",
            measured="test bits per dimension with every earlier pixel, blocks of the raster and blocks "
            "of the image",
            scale="8 x 8 digits in 17 grey levels, 2 layers of 96, 300 steps",
            rule="both local ones at most 0.03 bits per dimension above the dense one",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageLocalityClaim(Config):
    """Sizes of the three runs, which a second call goes on with; the blocks are meant for 8 x 8 pixels."""

    data: str | None = None  # an IDX file of images; by default scikit-learn's digits
    levels: int = 17
    block: int = 16  # 1D: pixels of a query block, and before it
    memory: int = 16
    query: tuple[int, int] = (2, 4)  # 2D: height and width of a query block; what it sees above, left, right
    around: tuple[int, int, int] = (3, 2, 2)
    held_out: float = 0.1  # share of the images to validate with, and as many to test on
    steps: int = 300
    images: int = 32  # in a batch
    layers: int = 2
    width: int = 96
    heads: int = 4
    lr: float = 3e-3
    seed: int = 0
    out: str = "runs/image-locality"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, images=self.images)
        at_least(1, layers=self.layers, width=self.width, heads=self.heads)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one of the runs came to."""

    keys: float  # that a pixel sees, on average
    validation: float  # bits per dimension
    test: float
    seconds: float  # a step


def run(config: ImageLocalityClaim) -> dict[str, Outcome]:
    """Train all three, write OUT/image_locality.csv and OUT/images.png, print the table and the verdict."""
    first: Any = next(iter(read(DataConfig(path=config.data), ImageConfig.needs, config.data)))
    shape = first["height"], first["width"]
    patterns: dict[str, Pattern] = {
        "dense": Full(),
        "local 1D": Local1D(config.block, config.memory),
        "local 2D": Local2D(shape, config.query, config.around),
    }
    folder, results, pictures = Path(config.out), {}, {}
    for name, pattern in patterns.items():
        out = folder / name.replace(" ", "-").lower()
        fitted = taken_up(Recipe.from_dict(recipe(config, shape, pattern)), out)
        tokens = config.images * (shape[0] * shape[1] + 1)
        speed = statistics.median(row.get("tokens_per_s") or 0 for row in read_metrics(out))
        validation, test = (fitted.scores[split]["bits_per_dim"] for split in ("validation", "test"))
        results[name] = Outcome(seen(pattern, shape[0] * shape[1]), validation, test, tokens / speed)
        pictures |= completed(fitted, name, config.seed)
    rows = ((name, *dataclasses.astuple(outcome)) for name, outcome in results.items())
    write_csv(folder / "image_locality.csv", ("attention", *fields_of(Outcome)), rows)
    print(table(results))
    write_pictures(folder / "images.png", pictures, config.levels)
    print(f"test images, their upper halves, and these completed: {folder / 'images.png'}")
    conclude(EXPERIMENT, config, [verdict(results)])
    return results


def recipe(config: ImageLocalityClaim, shape: tuple[int, int], pattern: Pattern) -> dict[str, Any]:
    """One of the three runs."""
    tokens = config.images * (shape[0] * shape[1] + 1)
    return {
        "task": {"kind": "image", "levels": config.levels, "batch_tokens": tokens},
        "model": decoder_options(
            config,
            dropout=0.0,
            pattern=pattern.to_text(),
            position={"kind": "grid", "shape": list(shape)},
        ),
        "data": {
            "path": config.data,
            "validation_fraction": config.held_out,
            "test_fraction": config.held_out,
        },
        "optimizer": {"kind": "adamw", "lr": config.lr},
        "schedule": {"kind": "cosine", "warmup": min(50, config.steps)},
        "training": {
            "steps": config.steps,
            "reporting": {"log_every": min(10, config.steps), "evaluate_every": config.steps},
            "saving": {"checkpoint_every": config.steps},
        },
        "seed": config.seed,
    }


def seen(pattern: Pattern, pixels: int) -> float:
    """How many keys a pixel has in a decoder, on average."""
    context, limited = Context(pixels, pixels, causal=True), pattern & Causal()
    return sum(count(limited.keys(context, i, i + 1).some) for i in range(pixels)) / pixels


def completed(fitted: Fitted, name: str, seed: int) -> dict[str, Tensor]:
    """Test images, their upper halves, and these completed by the model `name`."""
    assert isinstance(fitted.task, ImageModelling)
    assert fitted.splits.test is not None
    real, half, completed = fitted.task.complete(fitted.model, fitted.splits.test, IMAGES, seed)
    return {"real": real, "half": half, name: completed}


def verdict(results: dict[str, Outcome]) -> Verdict:
    """What the three say of the claim."""
    above = {
        name: outcome.test - results["dense"].test for name, outcome in results.items() if name != "dense"
    }
    holds = max(above.values()) < ALIKE
    words = "reproduced" if holds else "not reproduced"
    differences = ", ".join(f"{name} {bits:+.3f}" for name, bits in above.items())
    text = f"a pixel is predicted from those around it: {words} (bits a pixel against dense: {differences})"
    return verdict_of(holds, text)


def table(results: dict[str, Outcome]) -> str:
    """The outcomes as aligned text."""
    lines = [f"{'attention':<10}{'keys':>8}{'validation':>12}{'test':>8}{'ms a step':>11}"]
    lines += [
        f"{name:<10}{outcome.keys:>8.1f}{outcome.validation:>12.3f}{outcome.test:>8.3f}"
        f"{outcome.seconds * 1e3:>11.0f}"
        for name, outcome in results.items()
    ]
    return "\n".join([*lines, "(bits per dimension)"])
