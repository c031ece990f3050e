"""A classifier of long reviews reads the first tokens of each, or, converted, the whole of it.

A pretrained encoder is fine-tuned on reviews of at least `shortest` tokens: cut to `short`, as people do
whose model takes no more, and converted to `long` positions with each of the `attentions` (and dense, if
asked for). All see the same reviews as often, in the same number of steps, with the same seeds.

The claim (Beltagy et al. 2020, section 5.2, table 7: IMDB and Hyperpartisan): a classifier gains from the
text beyond the cut. The rule, written before it was run: the mean accuracy of the last of `attentions`, over
the seeds, is above that of cut reviews by more than the standard error that the number of tests leaves.

Deviations: any encoder in place of a Longformer that was pre-trained with its windows, which are met in
fine-tuning for the first time; a few hundred reviews, all of them long.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from polyformer.bench.claims import taken_up, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.timing import stopwatch
from polyformer.checkpoints import convert, from_pretrained
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.data import DataConfig, read
from polyformer.data.tokenizer_loading import load_tokenizer
from polyformer.recipes import Recipe
from polyformer.recipes.find import with_data
from polyformer.training.config import at_least

HEADER = ("label", "rating", "text")


EXPERIMENT = Experiment(
    sources={"data": "imdb", "model": "encoder"},
    quick={
        "shortest": 600,
        "short": 16,
        "long": 64,
        "texts": 16,
        "tests": 4,
        "epochs": 1,
        "batch": 2,
        "seeds": (0,),
        "attentions": ("Window(8) | Global(1)",),
    },
    claims=(
        Claim(
            name="long-reviews",
            says="a classifier gains from the text beyond the cut",
            paper="Beltagy et al. 2020 (Longformer)",
            section="section 5.2, table 7",
            published="IMDB 95.7 beside RoBERTa's 95.3, Hyperpartisan 94.8 beside 87.4",
            measured="accuracy on long reviews, cut at 256 tokens and read to 2,048 through a window",
            scale="all-MiniLM-L6-v2 fine-tuned on 480 of IMDB's reviews of 600 tokens or more",
            rule="the mean accuracy over the seeds is above that of cut reviews by more than the "
            "tests' standard error",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongReviewsClaim(Config):
    """The checkpoint, the reviews, and sizes; a second call goes on with what OUT holds."""

    model: str  # the folder of an encoder
    data: str  # a directory with IMDB's {train,test}.tsv[.gz]: label, rating, text
    shortest: int = 600  # tokens of a review that counts as long
    short: int = 256
    long: int = 2048
    attentions: tuple[str, ...] = ("Window(128) | Global(1)",)
    dense: bool = False  # also read `long` tokens with the checkpoint's own attention
    texts: int = 480  # to train on, evenly spread over the long ones
    tests: int = 600
    epochs: int = 2
    batch: int = 8  # reviews in a step, about
    lr: float = 5e-5
    seeds: tuple[int, ...] = (0, 1, 2)
    out: str = "runs/long-reviews"

    def __post_init__(self) -> None:
        at_least(8, short=self.short, shortest=self.shortest)
        at_least(self.short, long=self.long)
        at_least(2, texts=self.texts, tests=self.tests)
        at_least(1, epochs=self.epochs, batch=self.batch)
        if not self.attentions or not self.seeds:
            raise InputError("attentions, seeds: expected one or several of each")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """accuracy: on the tests, by seed. seconds: to train, of the last seed that this call trained."""

    accuracy: dict[int, float]
    seconds: float

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.accuracy.values())

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; 0 of one."""
        return statistics.stdev(self.accuracy.values()) if len(self.accuracy) > 1 else 0.0


def run(config: LongReviewsClaim) -> dict[str, Outcome]:
    """Fine-tune all; write OUT/long-reviews.csv, print each run, the table and the verdict."""
    folder = Path(config.out).absolute()
    data = chosen(config, folder / "data")
    mean_length = data.pop("mean_length")
    results: dict[str, Outcome] = {}
    for number, (name, length) in enumerate(members(config).items()):
        start = folder / f"start-{number}"
        if not start.is_dir():
            converted(config, name, length).save_pretrained(start)
        accuracy, seconds = {}, 0.0
        for seed in config.seeds:
            settings = Recipe.from_dict(recipe(config, start, length, mean_length, data, seed))
            fitted: list[Any] = []
            seconds = stopwatch(
                lambda settings=settings, at=folder / f"run-{number}-{seed}", fitted=fitted: fitted.append(
                    taken_up(settings, at)
                )
            )
            accuracy[seed] = fitted[0].scores["test"]["accuracy"]
            print(f"{name}, seed {seed}: {accuracy[seed]:.1%}, {seconds:,.0f} s", flush=True)
        results[name] = Outcome(accuracy, seconds)
        rows = ((member, *pair) for member, row in results.items() for pair in row.accuracy.items())
        write_csv(folder / "long-reviews.csv", ("member", "seed", "accuracy"), rows)
    print("\n".join(table(results)))
    conclude(EXPERIMENT, config, [verdict(config, results)])
    return results


def members(config: LongReviewsClaim) -> dict[str, int]:
    """What is compared, and how many tokens of a review it reads."""
    long = dict.fromkeys((*(("dense",) if config.dense else ()), *config.attentions), config.long)
    return {f"cut at {config.short}": config.short, **long}


def converted(config: LongReviewsClaim, name: str, length: int) -> Any:
    """The checkpoint with the positions and the attention of a member."""
    model = from_pretrained(config.model)
    attention = name if name in config.attentions else None
    longer = max(length, model.config.max_position_embeddings)
    return convert(model, attention, max_positions=longer)[0]


def chosen(config: LongReviewsClaim, out: Path) -> dict[str, Any]:
    """Files of long reviews in `out` by role, and how long those to train on are (mean_length, in tokens)."""
    tokenizer = load_tokenizer(config.model)
    paths = with_data({"path": "train.tsv", "test": "test.tsv"}, config.data)
    files: dict[str, Any] = {}
    for role, count in (("path", config.texts), ("test", config.tests)):
        rows = [
            dict(row) for row in read(DataConfig(format="tsv", header=HEADER), ("text", "label"), paths[role])
        ]
        lengths = [len(ids) for ids in tokenizer.encode_batch([row["text"] for row in rows])]
        long = [i for i, length in enumerate(lengths) if length >= config.shortest]
        if len(long) < count:
            raise InputError(
                f"{'texts' if role == 'path' else 'tests'}: expected at most the {len(long)} reviews of "
                f"{config.shortest} tokens or more, got {count}; take fewer, or a smaller --shortest"
            )
        picked = [long[i * len(long) // count] for i in range(count)]
        lines = ["text\tlabel", *(f"{rows[i]['text']}\t{rows[i]['label']}" for i in picked)]
        file = out / f"{Path(paths[role]).name.split('.')[0]}.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, ("\n".join(lines) + "\n").encode())
        files[role] = str(file)
        if role == "path":
            files["mean_length"] = statistics.fmean(min(lengths[i], config.long) for i in picked)
    return files


def recipe(
    config: LongReviewsClaim,
    start: Path,
    length: int,
    mean_length: float,
    data: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Fine-tuning from the checkpoint `start` on reviews cut to `length` tokens."""
    steps = max(1, config.epochs * config.texts // config.batch)
    return {
        "task": {
            "kind": "classify",
            "max_length": length,
            "too_long": "cut",
            "batch_tokens": max(length, round(config.batch * min(length, mean_length))),
        },
        "model": {"pretrained": str(start)},
        "data": {**data, "validation_fraction": 0.0},
        "tokenizer": {"path": str(Path(config.model).absolute())},
        "optimizer": {"kind": "adamw", "lr": config.lr, "weight_decay": 0.01},
        "schedule": {"kind": "linear", "warmup": max(1, steps // 10)},
        "training": {
            "steps": steps,
            "reporting": {"log_every": min(10, steps), "evaluate_every": steps},
            "saving": {"checkpoint_every": steps},
        },
        "seed": seed,
    }


def table(results: dict[str, Outcome]) -> list[str]:
    """A line a member."""
    wide = max(map(len, results))
    return [
        f"{'':<{wide}}  accuracy  spread",
        *(f"{name:<{wide}}  {row.mean:8.1%}{100 * row.spread:8.1f}" for name, row in results.items()),
    ]


def verdict(config: LongReviewsClaim, results: dict[str, Outcome]) -> Verdict:
    """What the accuracies say of the claim."""
    cut, whole = results[f"cut at {config.short}"].mean, results[config.attentions[-1]].mean
    error = (cut * (1 - cut) / config.tests) ** 0.5
    holds = whole - cut > error
    said = "reproduced" if holds else "not reproduced"
    return verdict_of(
        holds,
        f"a classifier gains from the text beyond the cut: {said} ({whole:.1%} with {config.long:,} tokens, "
        f"{cut:.1%} with {config.short}; standard error {error:.1%})",
    )
