"""Tokens that a text must or must not contain, with the option names of transformers."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeInt

# (logits [N, V], the text so far [N, T]) -> logits [N, V]; the input is not modified.
#
# The text begins with the prompt, padding as -1, or with the start token of an encoder-decoder's output.
Processor = Callable[[Tensor, Tensor], Tensor]

Token = NonNegativeInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstraintConfig(Config):
    """Forced and forbidden tokens."""

    forced_bos_token_id: Token | None = None  # after a beginning of one token: a language, for M2M and mBART
    forced_eos_token_id: tuple[Token, ...] = ()  # the last token that the length limit allows is one of them
    no_repeat_ngram_size: NonNegativeInt = 0  # no run of this many tokens occurs twice, prompt included
    bad_words_ids: tuple[tuple[Token, ...], ...] = ()  # runs of tokens that never occur
    suppress_tokens: tuple[Token, ...] = ()
    begin_suppress_tokens: tuple[Token, ...] = ()  # not allowed as the first token that is not forced

    def __post_init__(self) -> None:
        if not all(self.bad_words_ids):
            raise InputError("bad_words_ids: expected words of one token or more, got an empty one")
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = self.ids()[name]
            if forced and set(forced) <= set(self.suppress_tokens):
                raise InputError(
                    f"{name} and suppress_tokens: {list(forced)} is both forced and forbidden; "
                    f"take it out of one of them"
                )

    def ids(self) -> dict[str, tuple[int, ...]]:
        """Return all token ids by the field that contains them."""
        first = self.forced_bos_token_id
        return {
            "forced_bos_token_id": () if first is None else (first,),
            "forced_eos_token_id": self.forced_eos_token_id,
            "bad_words_ids": tuple(token for word in self.bad_words_ids for token in word),
            "suppress_tokens": self.suppress_tokens,
            "begin_suppress_tokens": self.begin_suppress_tokens,
        }


def no_repeat(size: int) -> Processor:
    """Forbid tokens that would complete a run of `size` tokens that the text already contains."""

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        length = history.shape[1]
        if length < size:
            return logits
        windows = history.unfold(1, size, 1)  # [N, length - size + 1, size]
        same = (windows[..., :-1] == history[:, None, length + 1 - size :]).all(-1)
        rows, places = (same & (windows[..., -1] >= 0)).nonzero(as_tuple=True)
        return forbidden_at(logits, rows, windows[rows, places, -1])

    return apply


def no_bad_words(words: tuple[tuple[int, ...], ...], device: torch.device) -> Processor:
    """Forbid tokens that would complete one of the `words`."""
    groups = []
    for size in sorted({len(word) for word in words}):
        # Words of one length are compared at once: [words, size].
        tokens = torch.tensor([word for word in words if len(word) == size], device=device)
        groups.append((size - 1, tokens[:, :-1], tokens[:, -1]))

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        length = history.shape[1]
        for before, beginnings, last in groups:
            if before <= length:
                begun = (history[:, None, length - before :] == beginnings).all(-1)  # [N, words]
                rows, which = begun.nonzero(as_tuple=True)
                logits = forbidden_at(logits, rows, last[which])
        return logits

    return apply


def forbidden(
    ids: tuple[int, ...], device: torch.device, first: int = 0, stop: int | None = None
) -> Processor:
    """Forbid the tokens `ids` while the text has at least `first` and fewer than `stop` tokens."""
    index = torch.tensor(ids, dtype=torch.long, device=device)

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        length = history.shape[1]
        if length < first or (stop is not None and length >= stop):
            return logits
        return logits.index_fill(1, index, -torch.inf)

    return apply


def forced(ids: tuple[int, ...], length: int, device: torch.device) -> Processor:
    """Force one of the tokens `ids`, all equally likely, when the text has `length` tokens."""
    index = torch.tensor(ids, dtype=torch.long, device=device)

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        if history.shape[1] != length:
            return logits
        return torch.full_like(logits, -torch.inf).index_fill_(1, index, 0.0)

    return apply


def forbidden_at(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Return `logits` with the tokens [M] of the rows [M] set to -inf."""
    if not len(rows):
        return logits
    return logits.index_put((rows, tokens), logits.new_tensor(-torch.inf))
