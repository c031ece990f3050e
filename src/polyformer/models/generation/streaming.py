"""Streaming: a callback for `generate` that shows each piece of text once it can no longer change."""

import sys
from collections.abc import Callable, Sequence

from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.generation.stopping import Decode, cut

# The replacement that decoders use for an incomplete character.
UNFINISHED = "\ufffd"


class TextStreamer:
    """A callback that decodes the tokens of one text and writes the new part.

    decode: the `decode` of a tokenizer. stop: the strings that end the text; they are not shown, nor any
    piece that may become part of them. write: receives the pieces, by default standard output.
    """

    def __init__(
        self, decode: Decode, stop: Sequence[str] = (), write: Callable[[str], object] = sys.stdout.write
    ):
        self.decode, self.stop, self.write = decode, tuple(stop), write
        self.tokens: list[int] = []
        self.written_length = 0

    def __call__(self, tokens: Tensor) -> None:
        """Receive the next token, [1]."""
        if len(tokens) != 1:
            raise InputError(f"streamer: a TextStreamer shows one text, got a batch of {len(tokens)}")
        self.tokens += tokens.tolist()
        text = self.decode(self.tokens)
        whole = cut(text, self.stop)
        self._show(whole, len(whole) - (_unstable_suffix(text, self.stop) if whole == text else 0))

    def finish(self) -> None:
        """Show the rest of the text."""
        whole = cut(self.decode(self.tokens), self.stop)
        self._show(whole, len(whole))

    def _show(self, text: str, end: int) -> None:
        if end > self.written_length:
            self.write(text[self.written_length : end])
            self.written_length = end


def _unstable_suffix(text: str, stop: Sequence[str]) -> int:
    """Return the number of characters at the end of `text` that may still change or become a stop string."""
    # Bytes of an incomplete character decode to U+FFFD.
    unfinished = len(text) - len(text.rstrip(UNFINISHED))
    starts = (size for string in stop for size in range(1, len(string)) if text.endswith(string[:size]))
    return max(unfinished, max(starts, default=0))
