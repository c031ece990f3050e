"""The results of generation."""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from polyformer.models.generation.continued_text import ContinuedText, Decode
from polyformer.models.generation.stopping import cut


@dataclasses.dataclass(frozen=True, eq=False)
class SearchResult:
    """The result of a search, N texts of at most L tokens: the fields of `Generated` without the prompt."""

    tokens: Tensor  # [N, L]
    lengths: Tensor
    scores: Tensor


@dataclasses.dataclass(frozen=True)
class DraftStatistics:
    """Statistics of speculative decoding over all rows.

    proposed, accepted: numbers of drafts. passes: passes of the model after the pass over the prompt; each
    covers all rows.
    """

    proposed: int = 0
    accepted: int = 0
    passes: int = 0

    def add(self, proposed: int = 0, accepted: int = 0, passes: int = 0) -> "DraftStatistics":
        """Return these numbers increased by the arguments."""
        return DraftStatistics(self.proposed + proposed, self.accepted + accepted, self.passes + passes)


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """N texts: `num_return_sequences` for each of the inputs, grouped by input.

    sequences: [N, T], prompt and new tokens of a decoder-only model, new tokens of an encoder-decoder; padded
    with the pad token. lengths: [N], numbers of new tokens, including the end token. scores: [N], the
    log-probability of the new tokens under the model; for beam search divided by `BeamConfig.divisor` of the
    length, best first. drafted: the statistics of a draft, if there was any. padding: [N], numbers of padding
    tokens before the prompts; None for no padding.
    """

    sequences: Tensor
    lengths: Tensor
    scores: Tensor
    prompt_length: int
    drafted: DraftStatistics | None = None
    padding: Tensor | None = None

    def new_tokens(self) -> list[list[int]]:
        """Return the new tokens, without prompt and padding."""
        rows = self.sequences[:, self.prompt_length :].tolist()
        return [row[:length] for row, length in zip(rows, self.lengths.tolist())]

    def texts(self, decode: Decode, stop: Sequence[str] = ()) -> list[str]:
        """Return the new text, up to the first of the `stop` strings.

        A prompt followed by its new text is the text of all its tokens: the space before the first new word
        belongs to the new text.
        """
        prompts = without_padding(self.sequences[:, : self.prompt_length], self.padding)
        return [
            cut(ContinuedText(decode, prompt)(row), stop) for prompt, row in zip(prompts, self.new_tokens())
        ]


def without_padding(prompts: Tensor, padding: Tensor | None) -> list[list[int]]:
    """Return the tokens of prompts [N, T] after `padding` [N] tokens each; None for no padding."""
    rows = prompts.tolist()
    return rows if padding is None else [row[count:] for row, count in zip(rows, padding.tolist())]
