"""Recurrent encoder-decoders, with and without attention, as baselines.

state of the decoder at step 0 = last states of the bidirectional encoder (Cho et al. 2014)
with attention: c_t = sum_s softmax(y_t W h_s) h_s is read next to y_t (Luong et al. 2015, section 3.1)
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RecurrentWriter(nn.Module):
    """An LSTM that writes a string after another LSTM has read one; both are `hidden_size` wide."""

    def __init__(self, vocab_size: int, start: int, hidden_size: int, attention: bool):
        super().__init__()
        self.start = start
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.reader = nn.LSTM(hidden_size, hidden_size // 2, batch_first=True, bidirectional=True)
        self.writer = nn.LSTM(hidden_size, hidden_size, batch_first=True)
        self.query = nn.Linear(hidden_size, hidden_size, bias=False) if attention else None
        self.output = nn.Linear(hidden_size * (2 if attention else 1), vocab_size)

    def forward(self, source: Tensor, labels: Tensor, start: Tensor) -> SimpleNamespace:
        """Return loss and predictions of targets [B, T] for sources [B, S]; `start` has no effect."""
        read, last = self.reader(self.tokens(source))
        state = tuple(x.transpose(0, 1).flatten(1).unsqueeze(0) for x in last)
        before = torch.cat([labels.new_full((len(labels), 1), self.start), labels[:, :-1]], 1)
        y, _ = self.writer(self.tokens(before), state)
        if self.query is not None:
            y = torch.cat([y, torch.softmax(self.query(y) @ read.mT, -1) @ read], -1)
        logits = self.output(y)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)
