"""The end of a text: an end token, or a stop string."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from polyformer.models.generation.continued_text import ContinuedText, Decode


@dataclasses.dataclass(frozen=True)
class Stopping:
    """The conditions that end a text.

    eos: end tokens. strings: stop strings, which require `decode`. prompts: the tokens before the new ones,
    for each input; they are not searched.
    """

    eos: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    decode: Decode | None = None
    prompts: Sequence[Sequence[int]] = ((),)

    @cached_property
    def continued(self) -> list[ContinuedText]:
        """Return the decoding of the new tokens of each input."""
        assert self.decode is not None
        return [ContinuedText(self.decode, prompt) for prompt in self.prompts]

    @property
    def can_end(self) -> bool:
        """Return whether a text may end before the limit of its length."""
        return bool(self.eos or self.strings)

    def ended(self, texts: Tensor, inputs: Sequence[int] | None = None) -> Tensor:
        """Return which of the new texts [N, T] ended with their last token: [N] bool.

        inputs: the index of the input of each text; None for the first of all.
        """
        ended = torch.zeros(len(texts), dtype=torch.bool, device=texts.device)
        for token in self.eos:
            ended = ended | (texts[:, -1] == token)
        if self.strings and self.decode is not None:
            # Decode the whole text: a token's text depends on its neighbours (bytes of one character,
            # spaces).
            owners = [0] * len(texts) if inputs is None else inputs
            decoded = [self.continued[owner](row) for owner, row in zip(owners, texts.tolist())]
            stopped = [any(string in text for string in self.strings) for text in decoded]
            ended = ended | torch.tensor(stopped, device=texts.device)
        return ended


def cut(text: str, stop: Sequence[str]) -> str:
    """Return `text` up to the first of the `stop` strings in it."""
    ends = [text.index(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text
