"""The sorting network: a block's representation says which blocks should stand in its place."""

import math

import torch
from torch import Tensor, nn


class SortingNet(nn.Module):
    """R_i = relu(r_i W_P + b_P) W_B + b_B, of each head its own; `count` is the most blocks of a document."""

    def __init__(self, heads: int, width: int, count: int):
        super().__init__()
        deviation = 1 / math.sqrt(width)
        self.hidden = nn.Parameter(torch.empty(heads, width, width).normal_(0.0, deviation))
        self.hidden_bias = nn.Parameter(torch.zeros(heads, width))
        self.scores = nn.Parameter(torch.empty(heads, width, count).normal_(0.0, deviation))
        self.scores_bias = nn.Parameter(torch.zeros(heads, count))

    def forward(self, x: Tensor) -> Tensor:
        """Representations [..., H, N, D] -> scores [..., H, N, count]."""
        hidden, scores = self.hidden.to(x.dtype), self.scores.to(x.dtype)
        x = torch.relu(x @ hidden + self.hidden_bias.to(x.dtype).unsqueeze(1))
        return x @ scores + self.scores_bias.to(x.dtype).unsqueeze(1)
