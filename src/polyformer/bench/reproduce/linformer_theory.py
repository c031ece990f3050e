"""The theorems of Linformer (Wang et al. 2020, sections 3 and 4, theorems 1 and 2), measured.

Attention P = softmax(A), A = Q K^T / sqrt(d), times a column w of the values, for random Q, K and V, and

    low-rank    || P R^T R w - P w ||      R [k, n], entries of variance 1 / k      theorem 1
    SVD         || P_k w - P w ||          the k greatest singular values of P      equation 6
    projected   || softmax(A E^T) F w - P w ||                                      theorem 2, equation 7

Theorem 1 bounds the error by epsilon || P w || for k = 5 log n / epsilon^2. The lemma of Johnson and
Lindenstrauss, on which it rests, bounds p R^T R w - p w by epsilon |p| |w| and not by epsilon |p w|: both are
measured. Of theorem 2, which says that E and F exist, E and F of its proof (d R and exp(-d) R with a small d)
and fitted ones are tried.

The text of the paper also has k = 5 log n / (2 epsilon^3), which for epsilon < 1/2 asks for more rows.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from polyformer.bench.claims import fields_of, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.training.config import at_least

QUANTILE = 0.95
"""Of the errors of many draws: what holds "with high probability"."""

LEARNING_RATE = 0.005
SMALL = 1e-3
"""d in the matrices of theorem 2's proof."""


EXPERIMENT = Experiment(
    quick={"lengths": (32, 48), "ks": (8, 16), "length": 32, "k": 8, "width": 8, "draws": 2, "fit_steps": 2},
    claims=(
        Claim(
            name="linformer-theorem-1-lemma",
            says="attention times R^T R is near attention, relative to |P| |w|",
            paper="Wang et al. 2020 (Linformer)",
            section="section 3, theorem 1",
            published="a bound for k = 5 log n / epsilon^2, by the lemma of Johnson and Lindenstrauss",
            measured="quantiles of the error over draws, against k and n",
            scale="random Q, K, V of width 64, n = 256 to 2,048, 20 draws",
            rule="the 95 % quantile is within the bound at every n and k",
        ),
        Claim(
            name="linformer-theorem-1",
            says="the same relative to |P w|, as the theorem is written",
            paper="Wang et al. 2020 (Linformer)",
            section="section 3, theorem 1",
            published="a bound for k = 5 log n / epsilon^2",
            measured="quantiles of the error over draws, against k and n",
            scale="random Q, K, V of width 64, n = 256 to 2,048, 20 draws",
            rule="the 95 % quantile is within the bound at every n and k",
        ),
        Claim(
            name="linformer-theorem-2-proof",
            says="projected attention is near attention with the matrices of the proof",
            paper="Wang et al. 2020 (Linformer)",
            section="section 4, theorem 2",
            published="a bound with E and F of the proof",
            measured="quantiles of the error over draws, against k and n",
            scale="random Q, K, V of width 64, n = 256 to 2,048, 20 draws",
            rule="at the greatest k the error is within the bound",
        ),
        Claim(
            name="linformer-theorem-2",
            says="matrices E and F exist with which projected attention is near attention",
            paper="Wang et al. 2020 (Linformer)",
            section="section 4, theorem 2",
            published="a bound with some E and F",
            measured="the error with E and F fitted to one draw",
            scale="random Q, K, V of width 64, n = 256 to 2,048, 20 draws",
            rule="at the greatest k the error is within the bound",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TheoryClaim(Config):
    """`common`: the part of every value that all tokens share, as a multiple of what differs."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    ks: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    length: int = 512  # where k is varied
    k: int = 128  # where the length is varied
    width: int = 64
    common: float = 1.0
    draws: int = 20  # of R
    fit_steps: int = 150  # to fit E and F; 0 leaves this out
    seed: int = 0
    out: str = "runs/linformer-theory"

    def __post_init__(self) -> None:
        at_least(1, width=self.width, draws=self.draws, length=self.length, k=self.k)
        at_least(0, fit_steps=self.fit_steps)
        if not self.ks or not self.lengths or min(*self.ks, *self.lengths) < 1:
            raise InputError(f"ks, lengths: expected 1 or more, got {list(self.ks)}, {list(self.lengths)}")


@dataclasses.dataclass(frozen=True)
class Error:
    """A measured error, relative to `norm`: "output" is || P w ||, "factors" || P || || w ||."""

    what: str
    norm: str
    length: int
    k: int
    value: float


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Scores A [n, n] and values V [n, d], float64."""

    scores: Tensor
    values: Tensor

    @classmethod
    def draw(cls, config: TheoryClaim, length: int) -> "Problem":
        """Normal queries, keys and values, the same for a seed."""
        generator = torch.Generator().manual_seed(config.seed)
        q, k, v = (
            torch.randn(length, config.width, dtype=torch.float64, generator=generator) for _ in range(3)
        )
        return cls(q @ k.T / math.sqrt(config.width), v + config.common)

    @property
    def weights(self) -> Tensor:
        """softmax(scores)."""
        return torch.softmax(self.scores, -1)

    def errors(self, approximation: Tensor) -> tuple[float, float]:
        """How far the outputs [n, d] are off, in the two norms: the quantile over the columns of V."""
        exact = self.weights @ self.values
        off = (approximation - exact).norm(dim=0)
        factors = self.weights.norm() * self.values.norm(dim=0)
        return _quantile(off / exact.norm(dim=0)), _quantile(off / factors)


def random_matrix(k: int, length: int, generator: torch.Generator) -> Tensor:
    """R [k, n] with entries of variance 1 / k."""
    return torch.randn(k, length, dtype=torch.float64, generator=generator) / math.sqrt(k)


def run(config: TheoryClaim) -> list[Error]:
    """Measure, write OUT/linformer_theory.csv, k.png and n.png, print a table and the verdicts."""
    results = [error for k in config.ks if k <= config.length for error in measure(config, config.length, k)]
    for length in config.lengths:
        if length != config.length and config.k <= length:
            results += [
                error for error in measure(config, length, config.k) if error.what in ("low-rank", "SVD")
            ]
    folder = Path(config.out)
    write_csv(folder / "linformer_theory.csv", fields_of(Error), map(dataclasses.astuple, results))
    print("\n".join(table(config, results)))
    by_k = {
        f"{what}, of {norm}": [(error.k, error.value) for error in own if error.length == config.length]
        for (what, norm), own in _grouped(results).items()
    }
    by_k["sqrt(5 log n / k)"] = [(k, bound(config.length, k)) for k in config.ks if k <= config.length]
    line_plot(folder / "k.png", by_k, f"k, at n = {config.length}", "relative error", log=True)
    by_n = {
        f"{what}, of {norm}": sorted((error.length, error.value) for error in own if error.k == config.k)
        for (what, norm), own in _grouped(results).items()
        if what in ("low-rank", "SVD")
    }
    by_n["sqrt(5 log n / k)"] = [(n, bound(n, config.k)) for n in sorted(config.lengths) if config.k <= n]
    line_plot(folder / "n.png", by_n, f"n, at k = {config.k}", "relative error", log=True)
    print(f"curves: {folder / 'k.png'}, {folder / 'n.png'}")
    conclude(EXPERIMENT, config, verdicts(results))
    return results


def measure(config: TheoryClaim, length: int, k: int) -> Iterator[Error]:
    """Every approximation at one n and k."""
    problem, generator = Problem.draw(config, length), torch.Generator().manual_seed(config.seed + 1)
    weights, values = problem.weights, problem.values
    draws = [random_matrix(k, length, generator) for _ in range(config.draws)]
    low_rank = [problem.errors(weights @ (r.T @ (r @ values))) for r in draws]
    total = torch.exp(problem.scores).sum(-1, keepdim=True)
    small = math.exp(-SMALL)
    proof = [
        problem.errors(torch.exp(SMALL * (problem.scores @ r.T)) @ (small * (r @ values)) / total)
        for r in draws
    ]
    u, s, vh = torch.linalg.svd(weights)
    svd = problem.errors(u[:, :k] * s[:k] @ (vh[:k] @ values))
    results = {
        "low-rank": tuple(_quantile(torch.tensor(errors_of_draw)) for errors_of_draw in zip(*low_rank)),
        "SVD": svd,
        "projected as in the proof": tuple(
            _quantile(torch.tensor(errors_of_draw)) for errors_of_draw in zip(*proof)
        ),
    }
    if config.fit_steps and length == config.length:
        results["projected, fitted"] = problem.errors(fitted(problem, k, config.fit_steps, generator))
    for what, pair in results.items():
        for norm, value in zip(("output", "factors"), pair):
            yield Error(what, norm, length, k, value)


def fitted(problem: Problem, k: int, steps: int, generator: torch.Generator) -> Tensor:
    """softmax(A E^T) F V with E and F [k, n] that make it as near P V as Adam can."""
    scores, values = problem.scores.float(), problem.values.float()
    exact, length = torch.softmax(scores, -1) @ values, len(scores)
    e, f = (
        (random_matrix(k, length, generator) * math.sqrt(k / length)).float().requires_grad_()
        for _ in range(2)
    )
    optimizer = torch.optim.Adam([e, f], lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        output = torch.softmax(scores @ e.T, -1) @ (f @ values)
        (output - exact).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        return (torch.softmax(scores @ e.T, -1) @ (f @ values)).double()


def bound(length: int, k: int) -> float:
    """epsilon of theorem 1 for k = 5 log n / epsilon^2."""
    return math.sqrt(5 * math.log(length) / k)


def verdicts(results: list[Error]) -> Iterator[Verdict | None]:
    """What the figures say of theorem 1, in the norm of the lemma and in that of the paper, and of theorem 2
    with the matrices of its proof and with fitted ones; None for what was not measured."""
    for norm, words in (("factors", "|P| |w|, as in the lemma"), ("output", "|P w|, as written")):
        own = [error for error in results if error.what == "low-rank" and error.norm == norm]
        worst = max(own, key=lambda error: error.value / bound(error.length, error.k))
        ratio = worst.value / bound(worst.length, worst.k)
        held = "reproduced" if ratio <= 1 else "not reproduced"
        at = f"error {worst.value:.3f} where the bound is {bound(worst.length, worst.k):.3f}"
        text = f"theorem 1, relative to {words}: {held} (worst at n={worst.length}, k={worst.k}: {at})"
        yield verdict_of(ratio <= 1, text)
    for what in ("projected as in the proof", "projected, fitted"):
        own = [error for error in results if error.what == what and error.norm == "output"]
        if not own:
            yield None
            continue
        last = max(own, key=lambda error: error.k)
        holds = last.value <= bound(last.length, last.k)
        held = "reproduced" if holds else "not reproduced"
        yield verdict_of(holds, f"theorem 2, {what}: {held} (error {last.value:.3f} of |P w| at k={last.k})")


def table(config: TheoryClaim, results: list[Error]) -> list[str]:
    """Lines of text: errors at the length where k varies."""
    ks = [k for k in config.ks if k <= config.length]
    lines = [f"error at n={config.length}".ljust(40) + "".join(f"{f'k={k}':>9}" for k in ks)]
    for (what, norm), own in _grouped(results).items():
        values = {error.k: error.value for error in own if error.length == config.length}
        cells = "".join(f"{values[k]:>9.4f}" for k in ks)
        lines.append(f"{what}, of {'|P w|' if norm == 'output' else '|P| |w|'}".ljust(40) + cells)
    return [*lines, "sqrt(5 log n / k)".ljust(40) + "".join(f"{bound(config.length, k):>9.4f}" for k in ks)]


def _grouped(results: list[Error]) -> dict[tuple[str, str], list[Error]]:
    groups: dict[tuple[str, str], list[Error]] = {}
    for error in results:
        groups.setdefault((error.what, error.norm), []).append(error)
    return groups


def _quantile(values: Tensor) -> float:
    return float(torch.quantile(values, QUANTILE))
