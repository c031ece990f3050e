"""Pairs of texts joined in one row of token ids for encoders."""

from collections.abc import Callable, Sequence

from polyformer.data import Tokenizer
from polyformer.data.batching import Row
from polyformer.data.pairs import shares_of_capacity
from polyformer.models.config import ModelConfig
from polyformer.training.tasks.text import with_tables


class PairEncoder:
    """The row format <cls> text <sep> pair <sep>, with token types 0 and 1.

    The tokenizer of a checkpoint may define another format. A row has at most `limit` tokens: if the two
    texts are too long, the longer text is truncated.
    """

    def __init__(self, tokenizer: Tokenizer, cls: int, sep: int, limit: int):
        ids, types = tokenizer.encode_for_model("", "")
        own = len(ids) > 2  # a checkpoint's tokenizer: RoBERTa has two </s> between, all of type 0
        self.between = ids[1:-1] if own else [sep]
        self.pair_type = types[-1] if own else 1
        self.tokenizer, self.cls, self.sep, self.limit = tokenizer, cls, sep, limit

    def adapt(self, config: ModelConfig) -> ModelConfig:
        """Return the config with two token types, if the second text has a separate type."""
        return with_tables(config, type_vocab_size=2) if self.pair_type else config

    def rows(self, texts: Sequence[str], pairs: Sequence[str], cut: Callable[[int, int], None]) -> list[Row]:
        """Return the token ids of each text and its pair.

        `cut` is called with the number and the length of each pair that has to be truncated, and may raise.
        """
        sides = self.tokenizer.encode_batch(texts), self.tokenizer.encode_batch(pairs)
        return [self._join(number, text, pair, cut) for number, (text, pair) in enumerate(zip(*sides))]

    def _join(self, number: int, text: list[int], pair: list[int], cut: Callable[[int, int], None]) -> Row:
        budget = self.limit - 2 - len(self.between)
        if len(text) + len(pair) > budget:
            cut(number, len(text) + len(pair) + self.limit - budget)
            kept = shares_of_capacity(len(text), len(pair), budget)
            text, pair = text[: kept[0]], pair[: kept[1]]
        first = [self.cls, *text, *self.between]
        types = {"token_type_ids": [0] * len(first) + [1] * (len(pair) + 1)} if self.pair_type else {}
        return {"input_ids": [*first, *pair, self.sep], **types}
