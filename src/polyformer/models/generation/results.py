"""The texts that `generate` returns: their ends, their characters, and a callback for each piece.

The text of new tokens depends on the tokens before them:

    text(new) = decode(prompt + new) without the beginning that it shares with decode(prompt)

SentencePiece and WordPiece write the space before a word, except at the beginning of a text, and several byte
tokens are one character. Decoded without the prompt, the new tokens would lose their first space.

A text ends with an end token or a stop string. A callback gets each piece of text once it can no longer
change.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from polyformer.core.errors import InputError

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
