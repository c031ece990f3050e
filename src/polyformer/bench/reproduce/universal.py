"""The claim "on longer strings than it was trained on a Universal Transformer still computes, where a plain
Transformer does not" (Dehghani et al. 2019, section 3.3, table 3), CPU-sized.

Equal encoder-decoders learn to copy or reverse strings of digits or to add numbers, from strings of at
most `length` digits, and are tested on longer ones: one layer a side in `layers` steps, as many layers of
half the width (equal parameters), and as many of the same width (equal computation). A fourth, which the
verdict leaves aside, is the third with positions added at every layer, as the Universal Transformer adds
them: it tells what sharing weights does from what these positions do.

Positions count from a random number, the same for source and target, as in the paper, so that all of those
that the longest string needs were met. The figures are shares of target tokens and of whole strings that the
model predicts after the true ones before; a string all of whose tokens are right is what it writes itself.

Deviations: lengths of 12 and 24 in place of 40 and 400, few steps, models a thousand times smaller. Norms
come before the sub-layers, as in the authors' code and not in their equations: with those after them a plain
Transformer does not learn to copy in so many steps. A source and its target begin at one position, where the
authors' code draws it for every step of both.
"""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.bench.claims import write_csv
from polyformer.bench.experiment import (
    UNSHOWN,
    Claim,
    Experiment,
    Verdict,
    conclude,
    joined,
    verdict_of,
)
from polyformer.bench.generated import Generated, trained
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError, unknown
from polyformer.data.strings import END, PAD, START, STRINGS, VOCABULARY
from polyformer.model import Transformer
from polyformer.outputs import ModelOutput
from polyformer.presets import create_model
from polyformer.sequence.tokens import Tokens
from polyformer.training import Batch
from polyformer.training.config import at_least

UNIVERSAL, NARROW, WIDE, PLACED = "universal", "equal parameters", "equal computation", "the same, placed"
MODELS = UNIVERSAL, NARROW, WIDE, PLACED
"""By their names in tables; the last has positions at every layer."""

AHEAD, LEARNT = 0.1, 0.95
"""Share of tokens at the greatest length that the Universal Transformer must be ahead by, and that of those
at the training length from which a model has learnt the task."""

Shares = Mapping[tuple[str, str, int, int], tuple[float, float]]
"""Of right tokens and of right strings, by task, model, seed and length."""


EXPERIMENT = Experiment(
    quick={
        "seeds": (0,),
        "length": 3,
        "lengths": (3, 6),
        "positions": 16,
        "rows": 2,
        "tested": 3,
        "steps": 2,
        "layers": 2,
        "width": 16,
        "heads": 2,
    },
    claims=(
        Claim(
            name="universal",
            says="on longer strings than it was trained on a Universal Transformer still computes, "
            "where a plain one does not",
            paper="Dehghani et al. 2019 (Universal Transformers)",
            section="section 3.3, table 3",
            published="trained at 40, tested at 400: copy 0.91 of characters beside 0.53",
            measured="share of right tokens at twice the training length, beside plain ones of equal "
            "parameters and of equal computation",
            scale="copying digits, 4 steps or layers of 64, lengths 12 and 24, 3,500 steps, three seeds",
            rule="means over the seeds: 0.95 or more at the training length, and at the greatest 0.1 "
            "or more ahead of both plain ones",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniversalClaim(Config):
    """Sizes of the runs; a second call goes on with what OUT holds."""

    tasks: tuple[str, ...] = ("copy",)  # also reverse, add
    models: tuple[str, ...] = MODELS
    seeds: tuple[int, ...] = (0, 1, 2)
    length: int = 12  # digits of the longest source trained on
    lengths: tuple[int, ...] = (6, 12, 16, 20, 24)  # digits of the sources tested on
    positions: int = 48  # that training meets
    rows: int = 32  # strings in a batch
    tested: int = 500  # strings of each length
    steps: int = 3500
    layers: int = 4
    width: int = 64
    heads: int = 4
    lr: float = 1e-3
    out: str = "runs/universal"

    def __post_init__(self) -> None:
        at_least(1, length=self.length, rows=self.rows, tested=self.tested, steps=self.steps)
        at_least(1, layers=self.layers, heads=self.heads)
        for name, chosen, known in (("task", self.tasks, STRINGS), ("model", self.models, MODELS)):
            for choice in chosen:
                if choice not in known:
                    raise unknown(name, choice, known)
        if not self.lengths or min(self.lengths) < 1 or not self.seeds:
            raise InputError("lengths, seeds: expected lengths of 1 or more, and a seed")
        if self.positions < 2 * max(*self.lengths, self.length):
            raise InputError(f"positions: expected twice the longest string, got {self.positions}")
        if self.width % (2 * self.heads):
            raise InputError(f"width: expected a multiple of {2 * self.heads}, twice the heads")


class FromPosition(nn.Module):
    """An encoder-decoder whose source and target begin at the position `start`."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, labels: Tensor, start: Tensor) -> ModelOutput:
        """Loss and predictions for sources [B, S] and targets [B, T]."""
        first = int(start)
        pos = torch.arange(first, first + source.shape[1], device=source.device)
        state = self.model.encode(source, position_ids=pos)
        state = dataclasses.replace(state, tokens=Tokens(0, dropped=first))
        target = self.model.shifted_right(labels, None)
        return self.model(decoder_input_ids=target, labels=labels, state=state)


def run(config: UniversalClaim) -> Shares:
    """Train and measure all; write OUT/universal.csv and .png, print tables and verdicts."""
    shares: dict[tuple[str, str, int, int], tuple[float, float]] = {}
    for seed in config.seeds:
        for task in config.tasks:
            for name in config.models:
                model = fitted(config, task, name, seed)
                for length in config.lengths:
                    shares[task, name, seed, length] = share = measured(config, model, task, length)
                    place = f"{task}, {name}, seed {seed}, {length} digits"
                    print(f"{place}: {share[0]:.3f} of tokens, {share[1]:.3f} of strings", flush=True)
    folder = Path(config.out)
    rows = ((*key, *share) for key, share in shares.items())
    write_csv(folder / "universal.csv", ("task", "model", "seed", "digits", "tokens", "strings"), rows)
    curves: dict[str, Any] = {
        f"{task}, {name}": [(n, mean(shares, task, name, n)[0]) for n in config.lengths]
        for task in config.tasks
        for name in config.models
    }
    line_plot(folder / "universal.png", curves, "digits", "share of tokens that are right")
    for task in config.tasks:
        print("\n".join(table(shares, task)))
    judged = [verdict(shares, task, config.length) for task in config.tasks]
    print(f"curves: {folder / 'universal.png'}")
    conclude(EXPERIMENT, config, [joined(judged, "\n".join(own.text for own in judged))])
    return shares


def fitted(config: UniversalClaim, task: str, name: str, seed: int) -> FromPosition:
    """The model trained, in a folder of OUT."""
    torch.manual_seed(seed)
    model = FromPosition(create(config, name))
    folder = Path(config.out) / f"{task}-{MODELS.index(name)}-{seed}"
    settings = dataclasses.replace(
        config, tasks=(task,), models=(name,), seeds=(seed,), lengths=(config.length,), tested=1, out=""
    )
    batches = Generated(lambda generator: drawn(config, task, generator), seed)
    trained(model, batches, config.steps, config.lr, settings, folder)
    return model


def create(config: UniversalClaim, name: str) -> Transformer:
    """A model with fresh weights."""
    width = config.width // 2 if name == NARROW else config.width
    return create_model(
        "transformer-tiny",
        num_hidden_layers=config.layers,
        num_hidden_groups=1 if name == UNIVERSAL else None,
        position="step_sinusoid" if name in (UNIVERSAL, PLACED) else "sinusoidal",
        hidden_size=width,
        num_attention_heads=config.heads,
        intermediate_size=4 * width,
        vocab_size=VOCABULARY,
        block="pre",
        dropout=0.0,
        label_smoothing=0.0,
        pad=PAD,
        bos=START,
        eos=END,
    )


def drawn(
    config: UniversalClaim, task: str, generator: torch.Generator, length: int | None = None, rows: int = 0
) -> Batch:
    """Strings of one length, by default one trained on, and where they begin."""
    if length is None:
        length = int(torch.randint(1, config.length + 1, (), generator=generator))
    source, target = STRINGS[task](rows or config.rows, length, generator)
    longest = max(source.shape[1], target.shape[1])
    start = torch.randint(0, max(1, config.positions - longest), (), generator=generator)
    return {"source": source, "labels": target, "start": start}


@torch.no_grad()
def measured(config: UniversalClaim, model: FromPosition, task: str, length: int) -> tuple[float, float]:
    """Shares of tokens and of strings that are right, of the same strings for every model."""
    batch = drawn(config, task, torch.Generator().manual_seed(length), length, config.tested)
    right = model(**batch).logits.argmax(-1) == batch["labels"]
    return float(right.float().mean()), float(right.all(1).float().mean())


def mean(shares: Shares, task: str, name: str, length: int) -> tuple[float, float]:
    """Shares of tokens and of strings, over the seeds."""
    some = [share for key, share in shares.items() if key[:2] == (task, name) and key[3] == length]
    tokens, strings = zip(*some)
    return statistics.mean(tokens), statistics.mean(strings)


def table(shares: Shares, task: str) -> list[str]:
    """Lines of text: a row for each model, a column for each length; tokens / strings."""
    lengths = sorted({key[3] for key in shares})
    lines = [f"{task:<20}" + "".join(f"{f'{n} digits':>14}" for n in lengths)]
    for name in dict.fromkeys(key[1] for key in shares):
        cells = ("{:.3f} / {:.2f}".format(*mean(shares, task, name, n)) for n in lengths)
        lines.append(f"{name:<20}" + "".join(f"{cell:>14}" for cell in cells))
    return [*lines, "(shares of tokens / of whole strings that are right)"]


def verdict(shares: Shares, task: str, trained_length: int) -> Verdict:
    """What the figures say of the claim for one task."""
    models, last = {key[1] for key in shares}, max(key[3] for key in shares)
    present = (task, UNIVERSAL, next(iter(shares))[2], trained_length) in shares
    if not present or not {NARROW, WIDE} <= models or last <= trained_length:
        needs = f"the first three models, at {trained_length} digits and beyond"
        return Verdict(UNSHOWN, f"{task}: no verdict: it needs {needs}")
    tokens = {
        name: [mean(shares, task, name, n)[0] for n in (trained_length, last)]
        for name in (UNIVERSAL, NARROW, WIDE)
    }
    best = max(tokens[name][1] for name in (NARROW, WIDE))
    differs = []
    if tokens[UNIVERSAL][0] < LEARNT:
        differs.append(f"it has not learnt {trained_length} digits")
    if tokens[UNIVERSAL][1] < best + AHEAD:
        differs.append("a plain one is as good or near")
    outcome = f"differs from the paper: {'; '.join(differs)}" if differs else "reproduced"
    cells = ", ".join(f"{name} {near:.3f} and {far:.3f}" for name, (near, far) in tokens.items())
    slow = [name for name in (NARROW, WIDE) if tokens[name][0] < LEARNT]
    note = f"; not learnt at {trained_length} digits either: {', '.join(slow)}" if slow else ""
    return verdict_of(
        not differs,
        f"{task}: a Universal Transformer computes on longer strings: {outcome} (tokens right at "
        f"{trained_length} and {last} digits: {cells}{note})",
    )
