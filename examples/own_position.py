"""Your own position scheme in one class: a learned bias that decreases with the log of the distance.

    python examples/own_position.py

The class registers itself. Then `position="log_distance"` works in Python, in recipes, and on the command
line (`polyformer train --import examples/own_position.py --model.position log_distance`). The folder
examples/own-member is an installable package of members.
"""

import dataclasses

import torch
from torch import nn

import polyformer
from polyformer.attention import Relative
from polyformer.attention.positions import Position, PositionConfig, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogDistanceConfig(PositionConfig):
    """`start`: the initial slope of every head."""

    start: float = 1.0

    kind = "log_distance"
    paper = "examples/own_position.py"

    def build(self, shape: Shape) -> Position:
        """Return the scheme for the heads of a stack."""
        return LogDistance(shape.num_heads, self.start)


class LogDistance(Position):
    """score_ij = q_i . k_j / sqrt(D) - slope_h log(1 + |i - j|)"""

    def __init__(self, num_heads: int, start: float):
        super().__init__()
        self.slopes = nn.Parameter(torch.full((num_heads, 1), start))

    def relative(self, q, k, context, site):
        """Return the bias [H, R] of the R distances in this call."""
        least, greatest = context.distances
        distance = torch.arange(least, greatest + 1, device=q.device, dtype=q.dtype).abs()
        return Relative(first=least, bias=-self.slopes * torch.log1p(distance))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = polyformer.create_model("decoder-tiny", vocab_size=64, position="log_distance(start=0.5)")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 61):
        steps = torch.randint(0, 2, (16, 24)) * 2 - 1
        ids = (
            8 + steps.cumsum(1) % 48
        )  # each token differs from its predecessor by +-1: the minimum loss is log 2 = 0.693
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}")

    # It combines with all other axes: here with a window, on a text of four times the length.
    windowed = polyformer.create_model(
        "decoder-tiny", vocab_size=64, position="log_distance", attention="Window(8, 0)"
    )
    print(f"logits {tuple(windowed(torch.randint(3, 64, (1, 96))).logits.shape)}")
    print("slopes:", [f"{slope:.2f}" for slope in model.decoder.position.slopes.flatten().tolist()])
