"""An n-gram language model as a baseline for language modelling: interpolated Kneser-Ney.

    P_k(w | c) = (max(N(c w) - D, 0) + D * kinds(c) * P_{k-1}(w | c')) / N(c)

c: the k - 1 tokens before w; c': c without its first token; N: counts; kinds(c): the number of different
tokens after c; P_0 = 1 / V. At the highest order N counts occurrences; at lower orders it counts the
different contexts of an n-gram (or occurrences, for n-grams at the start of a document, which have only one
context). D = n1 / (n1 + 2 n2), by order, where n1 and n2 n-grams have N of 1 and 2. After an unseen context,
P_k = P_{k-1}. Kneser and Ney 1995; Chen and Goodman 1999, section 2.7 and equation 16.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from polyformer.core.errors import InputError

Gram = tuple[int, ...]


class NGram:
    """An n-gram model of token ids; each document starts with <bos>, which is never predicted."""

    def __init__(self, documents: Iterable[Sequence[int]], order: int, vocab_size: int):
        if order < 1:
            raise InputError(f"order: expected 1 or more, got {order}")
        self.order, self.vocab_size = order, vocab_size
        self.tables = [_Table(counts) for counts in _counts(documents, order)]

    def probability(self, token: int, before: Sequence[int]) -> float:
        """Return P(token | before); `before`: all tokens before it in its document."""
        probability = 1 / self.vocab_size
        for k, table in enumerate(self.tables):
            if k > len(before):
                break
            context = tuple(before[len(before) - k :])
            total = table.totals.get(context)
            if total is None:
                break
            count = table.counts.get((*context, token), 0)
            left = table.discount * table.kinds[context]
            probability = (max(count - table.discount, 0.0) + left * probability) / total
        return probability

    def nats(self, documents: Iterable[Sequence[int]]) -> tuple[float, int]:
        """Return the sum of -ln P over all tokens of `documents` except <bos>, and their number."""
        nats, tokens = 0.0, 0
        for document in documents:
            for place in range(1, len(document)):
                before = document[max(0, place - self.order + 1) : place]
                nats -= math.log(self.probability(document[place], before))
            tokens += max(0, len(document) - 1)
        return nats, tokens


class _Table:
    """The n-grams of one order: counts, sums and kinds by context, and the discount."""

    def __init__(self, counts: dict[Gram, int]):
        self.counts = counts
        self.totals: dict[Gram, int] = defaultdict(int)
        self.kinds: dict[Gram, int] = defaultdict(int)
        for gram, count in counts.items():
            self.totals[gram[:-1]] += count
            self.kinds[gram[:-1]] += 1
        often = Counter(counts.values())
        # Without an n-gram of count 1 the formula gives 0, and unseen n-grams would be impossible.
        self.discount = often[1] / (often[1] + 2 * often[2]) if often[1] else 0.5


def _counts(documents: Iterable[Sequence[int]], order: int) -> list[dict[Gram, int]]:
    """Return N of the n-grams of orders 1 to `order`, in which <bos> is never the last token."""
    highest: Counter[Gram] = Counter()
    heads: list[Counter[Gram]] = [Counter() for _ in range(order)]  # n-grams that begin a document, by order
    for document in documents:
        highest.update(zip(*(document[i:] for i in range(order))) if order > 1 else zip(document[1:]))
        for k in range(2, min(order, len(document) + 1)):
            heads[k][tuple(document[:k])] += 1
    tables: list[dict[Gram, int]] = [highest]
    for k in range(order - 1, 0, -1):
        tables.insert(0, Counter(gram[1:] for gram in tables[0]) + heads[k])
    return tables
