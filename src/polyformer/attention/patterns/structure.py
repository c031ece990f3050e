"""The keys that blocks of queries need, without the length of a text, for graphs that serve every length.

A layout lists the keys of each run of queries of a given length; a graph for any length needs a rule instead.
"""

import dataclasses
import math
from collections.abc import Callable

MOST = 256
"""The largest block of a rule that combines blocks of several sizes."""


Links = Callable[[int], list[tuple[int, ...]]]
"""The key blocks of each of a number of query blocks."""


@dataclasses.dataclass(frozen=True)
class BlockNeeds:
    """The keys that queries may see; a superset is correct. Tokens are counted without padding.

    Args:
        size: blocks are tokens i * size .. (i + 1) * size - 1, or any multiple of it.
        before, after: a block sees as many tokens before its first and after its last.
        first, last: numbers of tokens at both ends of a text that see all and are seen by all.
        links: other blocks of `size` tokens that a block sees; None for none.
        whole: texts of at most as many tokens see themselves whole.
    """

    size: int = 1
    before: int = 0
    after: int = 0
    first: int = 0
    last: int = 0
    links: Links | None = None
    whole: int = 0

    def __or__(self, other: "BlockNeeds") -> "BlockNeeds | None":
        """Return the needs of both; None if blocks of both sizes do not fit together."""
        size = math.lcm(self.size, other.size)
        links = [needs.links for needs in (self, other) if needs.links is not None]
        if size > MOST or any(needs.links is not None and needs.size != size for needs in (self, other)):
            return None
        return BlockNeeds(
            size,
            max(self.before, other.before),
            max(self.after, other.after),
            max(self.first, other.first),
            max(self.last, other.last),
            links[0] if len(links) == 1 else _joined(links) if links else None,
            max(self.whole, other.whole),
        )

    @property
    def by_position(self) -> bool:
        """Return whether the keys depend on positions in the text, not only on distances."""
        return self.size > 1 or bool(self.first or self.last or self.whole)


def _joined(links: list[Links]) -> Links:
    def both(count: int) -> list[tuple[int, ...]]:
        return [tuple(sorted({*a, *b})) for a, b in zip(*(part(count) for part in links))]

    return both
