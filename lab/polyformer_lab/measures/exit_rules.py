"""Rules for early exits at equal risk: the layers that each rule saves in the same model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.nn.depth import full_depth, recorded_depths
from polyformer.nn.depth.exits import Exits, set_threshold
from polyformer.nn.depth.exits.rules import ExitRuleConfig
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.segments import first_tokens

BISECTIONS = 14
"""Halvings of the interval of thresholds from 0 to 1."""

Scored = tuple[float, float]
"""The share of tokens with another prediction than the whole model's, and the layers per token."""


@measurement("rule")
def exit_rules(cell: Cell, rules: list[str], risk: float, held_out: int, length: int) -> Iterator[Row]:
    """Yield for each rule the layers per token at the lowest threshold with at most `risk`.

    The risk is the share of next tokens that are predicted otherwise than by the whole model. The threshold
    is chosen on the first half of the held-out tokens, and the row is of the second half.

    Args:
        cell: a run with exits; the rule of its model must be among `rules` if it has weights.
        rules: names of rules.
        risk: the largest share.
        held_out: the number of validation tokens.
        length: tokens per row.
    """
    model = cell.fitted.model.eval()
    assert model.decoder is not None
    exits = model.decoder.depth
    if not isinstance(exits, Exits):
        raise InputError("model.depth: expected exits; set it to 'exits'")
    trained = exits.rule
    chosen_on, tested_on = first_tokens(cell.fitted, held_out).view(-1, length).chunk(2)
    for name in rules:
        same = name == exits.config.rule.kind
        config = ExitRuleConfig.from_dict(name, "rule")
        exits.rule = trained if same else config.build(model.config.hidden_size, len(exits.layers))
        threshold = lowest(scorer(model, chosen_on), risk)
        other, layers = scorer(model, tested_on)(threshold)
        yield {"rule": name, "threshold": threshold, "risk": other, "layers": layers}
    exits.rule = trained


def scorer(model: Transformer, ids: Tensor) -> Callable[[float], Scored]:
    """Return a function that scores a threshold on rows of ids [B, n], read in one pass."""

    @torch.no_grad()
    def choices(within: AbstractContextManager[None]) -> Tensor:
        with within:
            return model(ids).logits.argmax(-1)

    whole = choices(full_depth(True))

    def score(threshold: float) -> Scored:
        set_threshold(model, threshold)
        with recorded_depths() as depths:
            own = choices(nullcontext())
        return float((own != whole).double().mean()), float(depths[0].double().mean())

    return score


def lowest(score: Callable[[float], Scored], risk: float) -> float:
    """Return the lowest threshold with at most `risk`, by bisection: the risk falls as thresholds rise."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if score(middle)[0] <= risk else (middle, high)
    return high
