"""Streaming: a callback for `generate` that shows each piece of text once it can no longer change."""

import sys
from collections.abc import Callable, Sequence

from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.generation.continued_text import ContinuedText, Decode, shared_length
from polyformer.models.generation.stopping import cut

# The replacement that decoders use for an incomplete character.
UNFINISHED = "\ufffd"


class TextStreamer:
    """A callback that decodes the tokens of one text and writes the new part.

    decode: the `decode` of a tokenizer. stop: the strings that end the text; they are not shown, nor any
    piece that may become part of them. write: receives the pieces, by default standard output. The pieces
    continue the prompt, as in `Generated.texts`.
    """

    def __init__(
        self, decode: Decode, stop: Sequence[str] = (), write: Callable[[str], object] = sys.stdout.write
    ):
        self.text, self.stop, self.write = ContinuedText(decode), tuple(stop), write
        self.tokens: list[int] = []
        self.written_length = 0
        self.unfinished: int | None = None  # a token that is a part of a character

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Receive the tokens before the text, of a single prompt, before the first new token."""
        if len(prompts) == 1:
            self.text = ContinuedText(self.text.decode, prompts[0])

    def __call__(self, tokens: Tensor) -> None:
        """Receive the next token, [1]."""
        if len(tokens) != 1:
            raise InputError(f"streamer: a TextStreamer shows one text, got a batch of {len(tokens)}")
        self.tokens += tokens.tolist()
        if self.text.decode(self.tokens[-1:]) == UNFINISHED:
            self.unfinished = self.tokens[-1]
        text = self.text(self.tokens)
        whole = cut(text, self.stop)
        self._show(whole, self._stable_length(text) if whole == text else len(whole))

    def finish(self) -> None:
        """Show the rest of the text."""
        whole = cut(self.text(self.tokens), self.stop)
        self._show(whole, len(whole))

    def _show(self, text: str, end: int) -> None:
        if end > self.written_length:
            self.write(text[self.written_length : end])
            self.written_length = end

    def _stable_length(self, text: str) -> int:
        """Return the number of characters of `text` that can neither change nor become a stop string."""
        stable = len(text)
        if self.unfinished is not None:
            # Tokens of bytes are decoded together: one that is no character can change all before it.
            stable = shared_length(text, self.text([*self.tokens, self.unfinished]))
        # Bytes of an incomplete character decode to U+FFFD.
        whole = len(text[:stable].rstrip(UNFINISHED))
        starts = (
            size for string in self.stop for size in range(1, len(string)) if text.endswith(string[:size])
        )
        return min(whole, len(text) - max(starts, default=0))
