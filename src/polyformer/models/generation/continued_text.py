"""The text of new tokens, which depends on the tokens before them.

    text(new) = decode(prompt + new) without the beginning that it shares with decode(prompt)

SentencePiece and WordPiece write the space before a word, except at the beginning of a text, and several byte
tokens are one character. Decoded without the prompt, the new tokens would lose their first space.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text: a tokenizer's `decode`."""

CONTEXT = 256  # tokens of a long prompt that are decoded again with the new ones; more if they have no text


class ContinuedText:
    """The `decode` of a tokenizer for the tokens after a `prompt`, itself a `Decode`.

    The prompt followed by the text of new tokens is the text of all tokens. A character of several byte
    tokens that the prompt begins belongs to the new text.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        self.decode = decode
        self.context = _context(decode, list(prompt))
        self.before = decode(self.context) if self.context else ""

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` after the prompt."""
        whole = self.decode([*self.context, *tokens])
        return whole[shared_length(self.before, whole) :]


def shared_length(text: str, other: str) -> int:
    """Return the number of characters at the beginning that two texts share."""
    if other.startswith(text):
        return len(text)
    return next((i for i, pair in enumerate(zip(text, other)) if pair[0] != pair[1]), len(other))


def _context(decode: Decode, prompt: list[int]) -> list[int]:
    """Return the last tokens of `prompt`, as many as the text of the next tokens depends on."""
    size = CONTEXT
    # Special tokens have no text, so that a word after them alone would have no space before it.
    while size < len(prompt) and not decode(prompt[-size:]).strip():
        size *= 2
    return prompt[-size:]
