"""Texts that begin alike: the cache of tokens that a server has read before is not computed again.

    kept            a b c d e f        the state after a prompt, or after a prompt and its reply
    next prompt     a b c x y z
    taken over      a b c              a copy of the first slots (`states.beginning`)
    read now              x y z

So a system message is read once for all conversations, and the next turn of a conversation reads only what
is new in it. Keys and values depend only on the tokens before them, so the tokens that follow are the same.
This needs states that can be cut after any token: caches of all tokens, which also join batches. The texts
that were used last are kept, up to a number of tokens in all.
"""

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from polyformer.applications.serving.states import beginning
from polyformer.models.outputs import ModelState


class Beginning(NamedTuple):
    """The state after the first `length` tokens of a prompt."""

    length: int
    state: ModelState


class KeptTexts:
    """The states of the texts that were used last, of at most `most` tokens in all."""

    def __init__(self, most: int):
        self.most, self.tokens = most, 0
        self.states: OrderedDict[tuple[int, ...], ModelState] = OrderedDict()

    def add(self, ids: Sequence[int], state: ModelState) -> None:
        """Keep the state [1, T] after the tokens `ids` [T], and forget the states of its beginnings."""
        text = tuple(ids)
        if not 0 < len(text) <= self.most:
            return
        for other in [*self.states]:
            if text[: len(other)] == other:
                self._forget(other)
        self.states[text] = state
        self.tokens += len(text)
        while self.tokens > self.most:
            self._forget(next(iter(self.states)))

    def longest_beginning(self, ids: Sequence[int]) -> Beginning | None:
        """Return the longest kept beginning of a prompt, without its last token, as its logits are needed."""
        prompt = tuple(ids[:-1])
        lengths = {text: shared_length(text, prompt) for text in self.states}
        best = max(lengths, key=lambda text: lengths[text], default=())
        if not lengths.get(best):
            return None
        self.states.move_to_end(best)
        return Beginning(lengths[best], beginning(self.states[best], lengths[best]))

    def _forget(self, text: tuple[int, ...]) -> None:
        del self.states[text]
        self.tokens -= len(text)


def shared_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the number of first tokens that two texts have in common, by comparing O(log T) slices."""
    if a[:1] != b[:1]:
        return 0
    sizes = range(1, min(len(a), len(b)) + 1)
    return bisect.bisect_left(sizes, True, key=lambda size: a[:size] != b[:size])
