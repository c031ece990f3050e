"""Every pattern as a plain predicate of one query and one key, from its paper or its docstring.

A pattern is read for its options alone; nothing here calls a function of the library, so that what is wrong
there is not wrong here too.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Line:
    """One batch row and head of a call, in lists: what a predicate may know beside the two slots.

    query, key: positions by slot; document, segment, valid, marked: by slot of the keys, which queries share.
    """

    head: int
    causal: bool
    position: list[int]
    document: list[int]
    segment: list[int]
    valid: list[bool]
    marked: list[bool]

    def last_position(self, slot: int) -> int:
        """The position of the last real token of a slot's document."""
        own = [s for s, number in enumerate(self.document) if number == self.document[slot] and self.valid[s]]
        return self.position[own[-1]]


Predicate = Callable[[Any, Line, int, int], bool]

PLAIN: dict[str, Predicate] = {}
"""Whether a pattern lets the query in slot i attend to the key in slot j of its document, by its name."""


def plain(name: str) -> Callable[[Predicate], Predicate]:
    def enter(predicate: Predicate) -> Predicate:
        PLAIN[name] = predicate
        return predicate

    return enter


def attends(pattern: Any, line: Line, i: int, j: int) -> bool:
    """What the context alone forbids is forbidden in every pattern."""
    return PLAIN[type(pattern).__name__](pattern, line, i, j)


@plain("Full")
def full(pattern: Any, line: Line, i: int, j: int) -> bool:
    return True


@plain("Causal")
def causal(pattern: Any, line: Line, i: int, j: int) -> bool:
    return j <= i


@plain("Documents")
def documents(pattern: Any, line: Line, i: int, j: int) -> bool:
    return line.document[i] == line.document[j]


@plain("Padding")
def padding(pattern: Any, line: Line, i: int, j: int) -> bool:
    return line.valid[j]


@plain("Window")
def window(pattern: Any, line: Line, i: int, j: int) -> bool:
    distances = range(-pattern.after, pattern.before + 1)
    return i - j in [distance * pattern.dilation for distance in distances]


@plain("Aligned")
def aligned(pattern: Any, line: Line, i: int, j: int) -> bool:
    last = max(position for position, valid in zip(line.position, line.valid) if valid)
    center = min(math.floor(pattern.ratio * line.position[i] + 0.5), last)
    return center - pattern.left <= line.position[j] <= center + pattern.right


@plain("SourceSpans")
def source_spans(pattern: Any, line: Line, i: int, j: int) -> bool:
    """Contexts of these tests have no spans: every key is seen, up to position Tk - 1."""
    return True


@plain("WaitK")
def wait_k(pattern: Any, line: Line, i: int, j: int) -> bool:
    return line.position[j] < pattern.k + math.floor(pattern.ratio * line.position[i])


@plain("Strided")
def strided(pattern: Any, line: Line, i: int, j: int) -> bool:
    return (i - j) % pattern.stride == 0


@plain("Summary")
def summary(pattern: Any, line: Line, i: int, j: int) -> bool:
    return line.position[j] % pattern.stride in range(pattern.stride - pattern.columns, pattern.stride)


@plain("Fixed")
def fixed(pattern: Any, line: Line, i: int, j: int) -> bool:
    same_block = line.position[i] // pattern.stride == line.position[j] // pattern.stride
    return same_block or summary(pattern, line, i, j)


@plain("Global")
def global_tokens(pattern: Any, line: Line, i: int, j: int) -> bool:
    return line.position[i] < pattern.tokens or line.position[j] < pattern.tokens


@plain("GlobalEnd")
def global_end(pattern: Any, line: Line, i: int, j: int) -> bool:
    last = line.last_position(j)
    return max(line.position[i], line.position[j]) > last - pattern.tokens


@plain("Whole")
def whole(pattern: Any, line: Line, i: int, j: int) -> bool:
    return line.last_position(j) < pattern.tokens


@plain("Marked")
def marked(pattern: Any, line: Line, i: int, j: int) -> bool:
    return line.marked[i] or line.marked[j]


@plain("ETC")
def etc(pattern: Any, line: Line, i: int, j: int) -> bool:
    """The four pieces of Ainslie et al. 2020, section 3."""
    global_query, global_key = (line.position[slot] < pattern.global_tokens for slot in (i, j))
    same_segment = line.segment[i] == line.segment[j]
    if global_query and global_key:
        return True
    if global_query:
        return same_segment or not pattern.hard_g2l
    if global_key:
        return same_segment or not pattern.hard_l2g
    return abs(i - j) <= pattern.radius


@plain("BlockWindow")
def block_window(pattern: Any, line: Line, i: int, j: int) -> bool:
    blocks_before = line.position[i] // pattern.size - line.position[j] // pattern.size
    return -pattern.after <= blocks_before <= pattern.before


@plain("Blockwise")
def blockwise(pattern: Any, line: Line, i: int, j: int) -> bool:
    blocks = len(pattern.permutation)
    query, key = ((line.position[slot] + pattern.shift) // pattern.size for slot in (i, j))
    return query // blocks == key // blocks and pattern.permutation[query % blocks] == key % blocks


@plain("Links")
def links(pattern: Any, line: Line, i: int, j: int) -> bool:
    query, key = line.position[i] // pattern.size, line.position[j] // pattern.size
    return query < len(pattern.table) and key in pattern.table[query]


@plain("Random")
def random_blocks(pattern: Any, line: Line, i: int, j: int) -> bool:
    """The blocks that the query's drew; where the context is not causal, also those that drew the query's."""
    query, key = line.position[i] // pattern.size, line.position[j] // pattern.size
    if key in drawn(pattern.blocks, pattern.seed, query):
        return True
    return not line.causal and query in drawn(pattern.blocks, pattern.seed, key)


@functools.cache
def drawn(blocks: int, seed: int, block: int) -> set[int]:
    """Floyd's sample of `blocks` of the blocks before `block`; all of them while there are no more."""
    if block <= blocks:
        return set(range(block))
    chosen: set[int] = set()
    for number in range(blocks):
        top = block - blocks + number
        pick = scattered(block + scattered(number + scattered(seed))) % (top + 1)
        chosen.add(top if pick in chosen else pick)
    return chosen


def scattered(x: int) -> int:
    """Wellons' hash "lowbias32" of a 32-bit integer."""
    x %= 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


@plain("Local1D")
def local_1d(pattern: Any, line: Line, i: int, j: int) -> bool:
    query, key = line.position[i], line.position[i] - (i - j)
    first = query - query % pattern.query_block
    return key in range(max(0, first - pattern.memory), first + pattern.query_block)


@plain("Local2D")
def local_2d(pattern: Any, line: Line, i: int, j: int) -> bool:
    """The query's block of h x w pixels, and `above`, `left` and `right` pixels around it."""
    colours = pattern.shape[2] if len(pattern.shape) == 3 else 1
    (height, width), (above, left, right) = pattern.query, pattern.memory
    query, key = line.position[i], line.position[i] - (i - j)
    if key < 0:
        return False
    (query_row, query_column), (key_row, key_column) = (
        divmod(place // colours, pattern.shape[1]) for place in (query, key)
    )
    top, side = query_row - query_row % height, query_column - query_column % width
    rows, columns = range(top - above, top + height), range(side - left, side + width + right)
    return key_row in rows and key_column in columns


@plain("PerHead")
def per_head(pattern: Any, line: Line, i: int, j: int) -> bool:
    return attends(pattern.patterns[line.head % len(pattern.patterns)], line, i, j)


@plain("PerLayer")
def per_layer(pattern: Any, line: Line, i: int, j: int) -> bool:
    """Outside a stack there is one layer, the first."""
    return attends(pattern.patterns[0], line, i, j)


@plain("And")
def both(pattern: Any, line: Line, i: int, j: int) -> bool:
    return attends(pattern.left, line, i, j) and attends(pattern.right, line, i, j)


@plain("Or")
def either(pattern: Any, line: Line, i: int, j: int) -> bool:
    return attends(pattern.left, line, i, j) or attends(pattern.right, line, i, j)


@plain("Without")
def without(pattern: Any, line: Line, i: int, j: int) -> bool:
    return attends(pattern.left, line, i, j) and not attends(pattern.right, line, i, j)


@plain("Prefix")
def prefix(pattern: Any, line: Line, i: int, j: int) -> bool:
    return j <= i or line.position[j] < pattern.tokens


@plain("Neighbourhood")
def neighbourhood(pattern: Any, line: Line, i: int, j: int) -> bool:
    """The query's neighbourhood, moved along each side by as much as it sticks out of the image."""
    query = line.position[i]
    key = query - (i - j)
    if key < 0:
        return False
    for side, size in enumerate(pattern.shape):
        inner = math.prod(pattern.shape[side + 1 :])
        own, other = query // inner, key // inner
        window = [own + step for step in range(-(pattern.kernel // 2), pattern.kernel // 2 + 1)]
        out = min(window[0], 0) + max(window[-1] - size + 1, 0)
        if other not in [place - out for place in window]:
            return False
        query, key = query % inner, key % inner
    return True


@plain("BlockDiffusion")
def block_diffusion(pattern: Any, line: Line, i: int, j: int) -> bool:
    """The three parts of the mask of Arriola et al. 2025, section 3.3; segment 0 is the clean copy."""
    query, key = line.position[i] // pattern.size, line.position[j] // pattern.size
    noised_query, noised_key = line.segment[i] != 0, line.segment[j] != 0
    block_diagonal = noised_query and noised_key and query == key
    offset_block_causal = noised_query and not noised_key and key < query
    block_causal = not noised_query and not noised_key and key <= query
    return block_diagonal or offset_block_causal or block_causal
