"""Pairs of texts joined in one row of token ids for encoders."""

from collections.abc import Sequence

from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Row
from polyformer.data.rows.pairs import shares_of_capacity


class PairEncoder:
    """The row format <cls> text <sep> pair <sep>, with token types 0 and 1.

    The tokenizer of a checkpoint may define another format. A row has at most `limit` tokens: if the two
    texts are too long, the longer text is truncated. token_types: the number of types that the model needs.
    """

    def __init__(self, tokenizer: Tokenizer, cls: int, sep: int, limit: int):
        ids, types = tokenizer.encode_for_model("", "")
        own = len(ids) > 2  # a checkpoint's tokenizer: RoBERTa has two </s> between, all of type 0
        self.between = ids[1:-1] if own else [sep]
        self.token_types = 2 if not own or types[-1] else 0
        self.tokenizer, self.cls, self.sep, self.limit = tokenizer, cls, sep, limit

    def rows(self, texts: Sequence[str], pairs: Sequence[str]) -> tuple[list[Row], dict[int, int]]:
        """Return the token ids of each text and its pair, and the lengths of pairs before truncation."""
        rows, cut, around = list[Row](), dict[int, int](), 2 + len(self.between)
        sides = self.tokenizer.encode_batch(texts), self.tokenizer.encode_batch(pairs)
        for number, (text, pair) in enumerate(zip(*sides)):
            if (length := len(text) + len(pair) + around) > self.limit:
                cut[number] = length
                kept = shares_of_capacity(len(text), len(pair), self.limit - around)
                text, pair = text[: kept[0]], pair[: kept[1]]
            first = [self.cls, *text, *self.between]
            types = {"token_type_ids": [0] * len(first) + [1] * (len(pair) + 1)} if self.token_types else {}
            rows.append({"input_ids": [*first, *pair, self.sep], **types})
        return rows, cut
