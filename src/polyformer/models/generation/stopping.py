"""The end of a text: an end token, or a stop string."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Decode = Callable[[Sequence[int]], str]
"""Token ids to text: a tokenizer's `decode`."""


@dataclasses.dataclass(frozen=True)
class Stopping:
    """The conditions that end a text.

    eos: end tokens. strings: stop strings, which require `decode`.
    """

    eos: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    decode: Decode | None = None

    @property
    def can_end(self) -> bool:
        """Return whether a text may end before the limit of its length."""
        return bool(self.eos or self.strings)

    def ended(self, texts: Tensor) -> Tensor:
        """Return which of the texts [N, T] ended with their last token: [N] bool."""
        ended = torch.zeros(len(texts), dtype=torch.bool, device=texts.device)
        for token in self.eos:
            ended = ended | (texts[:, -1] == token)
        if self.strings and self.decode is not None:
            # Decode the whole text: a token's text depends on its neighbours (bytes of one character,
            # spaces).
            decoded = [self.decode(row) for row in texts.tolist()]
            stopped = [any(string in text for string in self.strings) for text in decoded]
            ended = ended | torch.tensor(stopped, device=texts.device)
        return ended


def cut(text: str, stop: Sequence[str]) -> str:
    """Return `text` up to the first of the `stop` strings in it."""
    ends = [text.index(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text
