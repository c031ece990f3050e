"""When a text has ended: at the end token, or once it contains a stop string."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Decode = Callable[[Sequence[int]], str]
"""Token ids to text: a tokenizer's `decode`."""


@dataclasses.dataclass(frozen=True)
class Stopping:
    """`eos`: the end token, None where there is none. `strings`: need `decode` to be looked for."""

    eos: int | None
    strings: tuple[str, ...] = ()
    decode: Decode | None = None

    def ended(self, written: Tensor) -> Tensor:
        """Which of the texts [N, T] ended with their last token: [N] bool."""
        ended = torch.zeros(len(written), dtype=torch.bool, device=written.device)
        if self.eos is not None:
            ended = written[:, -1] == self.eos
        if self.strings and self.decode is not None:
            # The whole text, since a token's text depends on its neighbours (bytes of one character, spaces).
            texts = [self.decode(row) for row in written.tolist()]
            found = [any(string in text for string in self.strings) for text in texts]
            ended = ended | torch.tensor(found, device=written.device)
        return ended


def cut(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first of the `stop` strings in it."""
    ends = [text.index(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text
