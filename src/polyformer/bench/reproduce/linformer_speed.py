"""Linformer's time and memory beside standard attention (Wang et al. 2020, tables 1 and 3, figure 2).

For every n and k: attention alone, from projected heads to mixed heads, and a whole layer, each beside
standard attention as the paper has it (its operations one after another) and torch's fused kernel. The
paper's table 3 stands beside ours. Dense attention stops where its scores would not fit.

Deviations: the paper compares whole models on a V100 and takes for memory the greatest batch that fits; here
it is one layer, and the peak memory of one call.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from polyformer.attention import LinformerConfig, SoftmaxConfig
from polyformer.attention.base import MechanismConfig
from polyformer.bench.attention import slope
from polyformer.bench.claims import fields_of, write_csv
from polyformer.bench.experiment import UNSHOWN, Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.linformer_tables import COMPLEXITY, PAPER, published
from polyformer.bench.memory import peak_mib
from polyformer.bench.plot import line_plot
from polyformer.bench.timing import in_turn, median
from polyformer.block import PreNormConfig
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.feedforward import DenseConfig
from polyformer.ops.norms import LayerNormConfig
from polyformer.position import NoPositionConfig, Shape
from polyformer.sequence.context import Context
from polyformer.stack import AttentionConfig
from polyformer.stack.layer import Layer
from polyformer.training.config import at_least

DENSE = "unfused", "sdpa"
LEVELS = "attention", "layer"


EXPERIMENT = Experiment(
    quick={
        "lengths": (16, 32),
        "ks": (4,),
        "tokens": 32,
        "heads": 2,
        "width": 4,
        "repeats": 1,
        "memory": False,
    },
    alone=True,
    claims=(
        Claim(
            name="linformer-attention-speed",
            says="Linformer's attention is faster than standard attention by table 3's factors",
            paper="Wang et al. 2020 (Linformer)",
            section="section 5.3, table 3",
            published="1.5 to 20 times at n = 512 to 65,536 on a V100",
            measured="time of attention alone over standard attention's, operation by operation",
            scale="8 heads of 64, float32 on a CPU",
            rule="at least the paper's factor at every n and k that both measured",
        ),
        Claim(
            name="linformer-layer-speed",
            says="a layer with Linformer's attention is faster by table 3's factors",
            paper="Wang et al. 2020 (Linformer)",
            section="section 5.3, table 3",
            published="the same; the paper times whole models",
            measured="time of a layer over that of one with standard attention",
            scale="8 heads of 64, float32 on a CPU",
            rule="at least the paper's factor at every n and k that both measured",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedClaim(Config):
    """Forward passes without gradients, float32 on a CPU; medians over `repeats` rounds in turn."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    ks: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    tokens: int = 4096  # in a batch, where n leaves room for several rows
    heads: int = 8
    width: int = 64  # of a head
    unfused_limit: int = 6000  # MiB that the scores of standard attention may take, twice
    fused_up_to: int = 16384  # tokens; beyond, the fused kernel takes too long
    levels: tuple[str, ...] = LEVELS
    memory: bool = True
    device: str = "cpu"
    repeats: int = 3
    out: str = "runs/linformer-speed"

    def __post_init__(self) -> None:
        at_least(1, heads=self.heads, width=self.width, repeats=self.repeats, tokens=self.tokens)
        if not self.lengths or not self.ks or min(*self.lengths, *self.ks) < 1:
            raise InputError(f"lengths, ks: expected 1 or more, got {list(self.lengths)}, {list(self.ks)}")
        if not self.levels or set(self.levels) - {*LEVELS}:
            raise InputError(f"levels: expected 'attention', 'layer' or both, got {list(self.levels)}")


@dataclasses.dataclass(frozen=True)
class Shot:
    """One thing to measure; `who` is "linformer" or one of `DENSE`."""

    level: str
    who: str
    length: int
    k: int
    rows: int
    heads: int
    width: int
    device: str

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"k={self.k}" if self.who == "linformer" else self.who


@dataclasses.dataclass(frozen=True)
class Measured:
    """One line of the result: per call of `rows` rows."""

    level: str
    who: str
    length: int
    k: int
    rows: int
    milliseconds: float
    peak_mib: float | None


class Unfused(nn.Module):
    """softmax(q k^T / sqrt(D)) v, one operation after the other, as a mechanism."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, None]:
        """The equation's products and its softmax, each a call of its own."""
        return torch.softmax(q @ k.mT * q.shape[3] ** -0.5, -1) @ v, None


def call(shot: Shot) -> Callable[[], object]:
    """The call to measure."""
    torch.manual_seed(0)
    mechanism = _mechanism(shot)
    context = Context(shot.length, shot.length)
    if shot.level == "attention":
        alone = (Unfused() if shot.who == "unfused" else mechanism.build(shot.heads, shot.width)).to(
            shot.device
        )
        shape = shot.rows, shot.length, shot.heads, shot.width
        q, k, v = (torch.randn(shape, device=shot.device).transpose(1, 2) for _ in range(3))
        return torch.no_grad()(lambda: alone(q, k, v, context, None, None))
    size = shot.heads * shot.width
    layer = Layer(
        size,
        AttentionConfig(num_attention_heads=shot.heads, mechanism=mechanism),
        DenseConfig(intermediate_size=4 * size, activation="gelu"),
        PreNormConfig(),
        LayerNormConfig(),
        0.0,
        cross=False,
        index=0,
    )
    if shot.who == "unfused":
        layer.attention.mechanism = Unfused()  # type: ignore[assignment]
    position = NoPositionConfig().build(Shape(hidden_size=size, num_heads=shot.heads, head_size=shot.width))
    layer = layer.to(shot.device).eval()
    x = torch.randn(shot.rows, shot.length, size, device=shot.device)
    return torch.no_grad()(lambda: layer(x, context, position))


def _mechanism(shot: Shot) -> MechanismConfig:
    if shot.who == "linformer":
        return LinformerConfig(max_length=shot.length, k=shot.k, sharing="layer")
    return SoftmaxConfig(backend="sdpa")


def shots(config: SpeedClaim, level: str, length: int) -> list[Shot]:
    """What is measured at one length; k is less than n, as in the paper."""
    rows = max(1, config.tokens // length)
    make = functools.partial(
        Shot,
        level=level,
        length=length,
        rows=rows,
        heads=config.heads,
        width=config.width,
        device=config.device,
    )
    scores = rows * config.heads * length**2 * 4 * 2 / (1 << 20)  # and their softmax
    dense = [
        who
        for who, fits in (("unfused", scores <= config.unfused_limit), ("sdpa", length <= config.fused_up_to))
        if fits
    ]
    return [make(who=who, k=0) for who in dense] + [
        make(who="linformer", k=k) for k in config.ks if k < length
    ]


def run(config: SpeedClaim) -> list[Measured]:
    """Measure, write OUT/linformer_speed.csv and a picture of each level, print tables and the verdict."""
    print(
        f"forward, {config.heads} heads of {config.width}, float32, {config.device}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    results: list[Measured] = []
    folder = Path(config.out)
    for level in config.levels:
        for length in config.lengths:
            results += _at(config, shots(config, level, length))
            columns = *fields_of(Measured), "paper_time", "paper_memory"
            write_csv(folder / "linformer_speed.csv", columns, map(_row, results))
    for level in config.levels:
        own = [line for line in results if line.level == level]
        for text in (
            *_table(own, "time", "unfused"),
            *_table(own, "time", "sdpa"),
            *_table(own, "memory", "unfused"),
            *_table(own, "memory", "sdpa"),
        ):
            print(text)
        print("\n".join(_slopes(own)))
        _draw(folder / f"{level}.png", own)
    by_level = {level: [line for line in results if line.level == level] for level in config.levels}
    print(COMPLEXITY)
    print(f"curves: {', '.join(str(folder / f'{level}.png') for level in config.levels)}")
    conclude(EXPERIMENT, config, [verdict(own) if (own := by_level.get(level)) else None for level in LEVELS])
    return results


def _at(config: SpeedClaim, own: list[Shot]) -> Iterator[Measured]:
    peaks = {}
    for shot in own:
        warm = dataclasses.replace(shot, length=256, k=min(shot.k, 128), rows=1)
        peaks[shot.name] = peak_mib(call, shot, warm, config.device) if config.memory else None
    seconds = in_turn({shot.name: call(shot) for shot in own}, config.repeats)
    for shot in own:
        milliseconds = median(seconds[shot.name]) * 1e3
        line = Measured(shot.level, shot.who, shot.length, shot.k, shot.rows, milliseconds, peaks[shot.name])
        print(f"{shot.level} {shot.name} at {shot.length}: {line.milliseconds:.1f} ms", flush=True)
        yield line


def ratios(own: list[Measured], what: str, against: str) -> dict[tuple[int, int], float]:
    """How many times less time or memory than `against`, by (n, k)."""
    values = {
        (line.who, line.length, line.k): line.milliseconds if what == "time" else line.peak_mib
        for line in own
    }
    return {
        (n, k): dense / value
        for (who, n, k), value in values.items()
        if who == "linformer" and value and (dense := values.get((against, n, 0)))
    }


def _table(own: list[Measured], what: str, against: str) -> Iterator[str]:
    """Ours and, behind a stroke, the paper's."""
    results = ratios(own, what, against)
    if not results:
        return
    ks = sorted({k for _, k in results})
    yield f"{own[0].level}, {what} of {against} attention over Linformer's (| the paper's):"
    yield f"{'n':>7}" + "".join(f"{f'k={k}':>16}" for k in ks)
    for n in sorted({n for n, _ in results}):
        cells = [f"{results[n, k]:.1f} | {_paper(what, n, k)}" if (n, k) in results else "" for k in ks]
        yield f"{n:>7}" + "".join(f"{cell:>16}" for cell in cells)


def _paper(what: str, n: int, k: int) -> str:
    value = published(what, n, k)
    return "-" if value is None else f"{value:g}"


def _slopes(own: list[Measured]) -> Iterator[str]:
    """Growth of the time for one row with n: 1 is linear, 2 quadratic."""
    for name in dict.fromkeys((line.who, line.k) for line in own):
        points = [(line.length, line.milliseconds / line.rows) for line in own if (line.who, line.k) == name]
        value = slope(points)
        if value is not None:
            yield f"{own[0].level}, {_name(*name)}: log-log slope of time {value:.2f}"


def verdict(own: list[Measured]) -> Verdict:
    """Whether one level is at least as many times faster than with unfused attention as in the paper."""
    results = ratios(own, "time", "unfused")
    compared = {
        at: (value, wanted) for at, value in results.items() if (wanted := published("time", *at)) is not None
    }
    short = [
        f"n={n}, k={k}: {value:.1f}x of {wanted:g}x"
        for (n, k), (value, wanted) in compared.items()
        if value < wanted
    ]
    if not compared:
        return Verdict(UNSHOWN, "table 3: no verdict, nothing that the paper measured was measured")
    held = f"not reproduced everywhere ({'; '.join(short)})" if short else "reproduced"
    text = f"table 3, time at the level of the {own[0].level}, {len(compared)} entries: {held}"
    return verdict_of(not short, text)


def _draw(path: Path, own: list[Measured]) -> None:
    """Figure 2: the time for as many tokens as the longest input has, so that linear growth is flat."""
    most = max(line.length for line in own)
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in own:
        milliseconds = line.milliseconds * most / (line.rows * line.length)
        curves.setdefault(_name(line.who, line.k), []).append((line.length, milliseconds))
    line_plot(path, curves, "n", f"milliseconds for {most} tokens", log=True)


def _name(who: str, k: int) -> str:
    return f"Linformer k={k}" if who == "linformer" else who


def _row(line: Measured) -> tuple[object, ...]:
    paper = ("" if (value := published(what, line.length, line.k)) is None else value for what in PAPER)
    return *dataclasses.astuple(line), *paper
