"""Closed-form fitting of the exits of a trained decoder, from one pass over a text.

With h_t the hidden state of token t after an exit's layer, and e_t its state after the last layer before the
norm, the exit's translation h + A h + b is the ridge regression of e - h on h,

    A, b = argmin sum_t |h_t + A h_t + b - e_t|^2 / |e_t|^2 + r s |A|^2        (r and s: `NormalEquations`)

The norm divides by the size of e_t, and so does the error: otherwise the few tokens with huge states
(attention sinks) would dominate. r is chosen by the divergence of the exit's predictions from the final
predictions on held-out rows, one in `HELD_OUT`. The final norm and the head thus receive approximately their
usual input. Belrose et al. 2023 (Eliciting latent predictions with the tuned lens) train the same map by
gradients. A shortlist gets the rows of the output matrix for the tokens that the full model predicts most
often.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.ops.linear import Linear
from polyformer.models.architectures import Transformer
from polyformer.nn.depth import recorded_states
from polyformer.nn.depth.exits import Exits
from polyformer.nn.depth.exits.exits import Exit
from polyformer.nn.depth.exits.rules import Shortlist

RIDGES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
HELD_OUT = 10  # every `HELD_OUT`-th row is held out
ROWS = 8  # per batch
# The most held-out tokens for which predictions are computed, in chunks of `PART`.
TOKENS, PART = 1024, 128


@dataclasses.dataclass(frozen=True)
class FittedExit:
    """The exit after `layer`, with the chosen ridge."""

    layer: int
    ridge: float
    divergence: float  # mean KL divergence from the final predictions on held-out tokens
    before: float  # the same with the map before fitting


class NormalEquations:
    """Ridge regression in one pass over any number of rows, by accumulated normal equations in float64.

    With rows x_t of X [N, E] and y_t of Y [N, F], of weights w_t,

        A, b = argmin sum_t w_t |x_t A + b - y_t|^2 + r s |A|^2,      s = sum_t w_t |x_t|^2 / E

    so that r has no unit. The sums are X^T W X [E + 1, E + 1], with a column of ones in X, and X^T W Y
    [E + 1, F].
    """

    def __init__(self, inputs: int, outputs: int):
        self.xx = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
        self.xy = torch.zeros(inputs + 1, outputs, dtype=torch.float64)

    @property
    def weight(self) -> float:
        """Return the sum of the weights."""
        return float(self.xx[-1, -1])

    def add(self, x: Tensor, y: Tensor, weights: Tensor) -> None:
        """Add rows x [N, E] and y [N, F] with weights [N]."""
        x = torch.cat([x, x.new_ones(len(x), 1)], 1).to(self.xx)
        y, weights = y.to(self.xy), weights.to(self.xx)
        weighted = x * weights.unsqueeze(1)
        self.xx += weighted.T @ x
        self.xy += weighted.T @ y

    def solved(self, ridges: Sequence[float]) -> list[Tensor]:
        """Return A above b for each of the ridges, [E + 1, F].

        With the means subtracted from X and Y, A = (X^T W X + r s I)^+ X^T W Y; all ridges share an
        eigendecomposition.
        """
        x, y = self.xx[:-1, -1:] / self.weight, self.xy[-1:] / self.weight  # the means [E, 1] and [1, F]
        values, vectors = torch.linalg.eigh(self.xx[:-1, :-1] - self.weight * x @ x.T)
        turned = vectors.T @ (self.xy[:-1] - self.weight * x @ y)
        least = values[-1] * len(values) * torch.finfo(values.dtype).eps  # zero up to rounding
        solutions = []
        for ridge in ridges:
            size = values.clamp_min(0) + ridge * self.xx.diagonal()[:-1].mean()
            a = vectors @ torch.where(size > least, turned.T / size, 0).T
            solutions.append(torch.cat([a, y - x.T @ a]))
        return solutions


@torch.no_grad()
def fit_exits(
    model: Transformer,
    rows: Sequence[Sequence[int]],
    show: Callable[[int], None] = lambda tokens: None,
) -> list[FittedExit]:
    """Write translations, and the rows of a shortlist, into the exits of `model`, in place.

    rows: token ids, all of one length. show: called with the number of tokens read so far. Raises
    `InputError` for a model that is not decoder-only with exits, for exits with neither a translation nor a
    shortlist, and for fewer than two rows.
    """
    exits = fittable_exits(model)
    if len(rows) < 2:
        raise InputError(f"fit: expected at least two rows, because some are held out, got {len(rows)}")
    size, device, model = model.config.hidden_size, next(model.parameters()).device, model.eval()
    equations = [NormalEquations(size, size) for _ in exits.exits]
    predicted = torch.zeros(model.config.vocab_size, dtype=torch.long)
    held_out = [row for n, row in enumerate(rows) if n % HELD_OUT == 0]
    fitted = [row for n, row in enumerate(rows) if n % HELD_OUT]
    for start in range(0, len(fitted), ROWS):
        states, end, hidden = exit_states(model, fitted[start : start + ROWS], device)
        weights = 1 / end.square().mean(1).clamp_min(torch.finfo(end.dtype).tiny)
        for own, state in zip(equations, states):
            own.add(state, end - state, weights)
        if isinstance(exits.rule, Shortlist):
            choices = model.predictions(hidden).argmax(-1).flatten().cpu()
            predicted += torch.bincount(choices, minlength=len(predicted))
        show(min(start + ROWS, len(fitted)) * len(rows[0]))
    states, _, hidden = exit_states(model, held_out[: max(1, TOKENS // len(rows[0]))], device)
    if isinstance(exits.rule, Shortlist):
        fill(exits.rule, model, predicted, hidden)
    if exits.config.translation != "linear":
        return []
    return [
        translate(model, exits, number, own, state, hidden.flatten(0, 1))
        for number, (own, state) in enumerate(zip(equations, states))
    ]


def exit_states(
    model: Transformer, rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the states [N, E] after each exit's layer and after the last layer, and hidden [B, T, E].

    hidden is the input of the head.
    """
    with recorded_states() as records:
        hidden = model(torch.tensor(rows, device=device)).last_hidden_state
    *states, end = (state.flatten(0, 1) for state in records[0])
    return states, end, hidden


def fittable_exits(model: Transformer) -> Exits:
    """Return the exits of a decoder-only model that can be fitted; raises `InputError` if there are none."""
    exits = None if model.decoder is None else model.decoder.depth
    if not isinstance(exits, Exits) or model.encoder is not None:
        raise InputError(
            "fit: expected a decoder-only model with exits; add exits with --depth "
            "'exits(translation=linear)'"
        )
    if exits.config.translation != "linear" and not isinstance(exits.rule, Shortlist):
        raise InputError(
            "fit: these exits have no parameters to fit; use --depth 'exits(translation=linear)' or "
            "rule=shortlist"
        )
    return exits


def translate(
    model: Transformer, exits: Exits, number: int, equations: NormalEquations, states: Tensor, hidden: Tensor
) -> FittedExit:
    """Solve for one exit with every ridge, and write the solution with the best predictions.

    Predictions are compared on the held-out `states` [N, E] with `hidden` [N, E], the final input of the
    head.
    """
    exit = exits.exits[number]
    assert isinstance(exit, Exit)
    linear = exit.map
    assert isinstance(linear, Linear)

    def write(solution: Tensor) -> None:
        linear.weight.copy_(solution[:-1].T)
        linear.bias.copy_(solution[-1])

    before, tried = divergence(model, exit, states, hidden), dict[float, float]()
    solutions = dict(zip(RIDGES, equations.solved(RIDGES)))
    for ridge, solution in solutions.items():
        write(solution)
        tried[ridge] = divergence(model, exit, states, hidden)
    best = min(RIDGES, key=lambda ridge: tried[ridge])
    write(solutions[best])
    return FittedExit(exits.layers[number], best, tried[best], before)


def divergence(model: Transformer, exit: Exit, states: Tensor, hidden: Tensor) -> float:
    """Return the mean of KL(p, q) over the tokens.

    p: predictions from the final input of the head, `hidden` [N, E]. q: predictions of the exit from its
    `states` [N, E].
    """
    total = 0.0
    for state, end in zip(states.split(PART), hidden.split(PART)):
        p, q = (model.predictions(x.unsqueeze(0)).float().log_softmax(-1) for x in (end, exit(state)))
        total += float((p.exp() * (p - q)).sum())
    return total / len(states)


def fill(rule: Shortlist, model: Transformer, predicted: Tensor, hidden: Tensor) -> None:
    """Fill the shortlist with the output matrix and bias of the tokens that are predicted most often.

    predicted: counts [V].

    They are derived from the head's output for 0 and for unit vectors, so that weight tying does not matter.
    Raises `InputError` for a head that is not such a product, checked on `hidden` [B, T, E].
    """
    size, device = model.config.hidden_size, hidden.device
    best = predicted.topk(min(len(rule.rows), len(predicted))).indices.to(device)

    def logits(x: Tensor) -> Tensor:
        return model.predictions(x.unsqueeze(0))[0].index_select(-1, best)

    bias = logits(hidden.new_zeros(1, size))[0]
    columns = [logits(unit) - bias for unit in torch.eye(size, device=device, dtype=hidden.dtype).split(64)]
    matrix = torch.cat(columns).T
    sample = hidden.flatten(0, 1)[:8]
    if not torch.allclose(sample @ matrix.T + bias, logits(sample), rtol=1e-2, atol=1e-2):
        raise InputError(
            "depth.rule: 'shortlist' requires a head that is a single product with the output matrix"
        )
    rule.rows.zero_()
    rule.bias.fill_(-torch.inf)
    rule.rows[: len(best)], rule.bias[: len(best)] = matrix, bias
