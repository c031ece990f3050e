"""What generation returns."""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from polyformer.generation.stopping import Decode, cut


@dataclasses.dataclass(frozen=True, eq=False)
class SearchResult:
    """What a search wrote, N texts of at most L tokens: the fields of `Generated` without the prompt."""

    tokens: Tensor  # [N, L]
    lengths: Tensor
    scores: Tensor


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What speculative decoding did: drafts `proposed` and `accepted`, over all rows, and the `passes` of the
    model after that over the prompt, each over all rows."""

    proposed: int = 0
    accepted: int = 0
    passes: int = 0

    def plus(self, proposed: int = 0, accepted: int = 0, passes: int = 0) -> "Drafted":
        """With so many more."""
        return Drafted(self.proposed + proposed, self.accepted + accepted, self.passes + passes)


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """N texts: `num_return_sequences` for each of the inputs, those of one input together.

    sequences: [N, T], of a decoder alone the prompt and what it wrote, of an encoder-decoder what it wrote;
    a text that ended early is filled up with the pad token. lengths: [N], tokens written, the end token
    included. scores: [N], the natural logarithm of the probability that the model gives to what was written;
    of beam search divided by `BeamConfig.divisor` of the length, best first. drafted: with a draft, what came
    of it.
    """

    sequences: Tensor
    lengths: Tensor
    scores: Tensor
    prompt_length: int
    drafted: Drafted | None = None

    def new_tokens(self) -> list[list[int]]:
        """What was written, without prompt and padding."""
        rows = self.sequences[:, self.prompt_length :].tolist()
        return [row[:length] for row, length in zip(rows, self.lengths.tolist())]

    def texts(self, decode: Decode, stop: Sequence[str] = ()) -> list[str]:
        """What was written as text, up to the first of the `stop` strings."""
        return [cut(decode(row), stop) for row in self.new_tokens()]
