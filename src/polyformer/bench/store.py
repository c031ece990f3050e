"""What a segment costs a Memorizing Transformer's layer beside a large store: milliseconds a head to look up
the nearest entries of its queries, with their values, and to store its own keys.

Ours by every search, all exact, beside memorizing-transformers-pytorch, whose index (HNSW) is approximate:
`recall` is the share of the nearest entries that it finds, once as it is and once with a search so wide that
it finds at least `wanted`. Keys are unit vectors drawn around centres, in a space of fewer dimensions than
they have, as those of attention are; queries are drawn as keys.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.bench.benchmark_case import AbsentError
from polyformer.bench.memorizing_peer import PublicStore
from polyformer.bench.timing import in_turn, median
from polyformer.core.config import Config
from polyformer.memory.search import SEARCHES, entries
from polyformer.memory.store import Store
from polyformer.sequence.context import Context
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreBench(Config):
    """What is measured, of one head."""

    entries: int = 65_536
    queries: int = 512
    width: int = 64
    neighbours: int = 32
    centres: int = 1024
    rank: int = 16  # dimensions in which keys differ from their centre
    wanted: float = 0.95  # recall
    peer: bool = True  # take memorizing-transformers-pytorch in
    repeats: int = 7

    def __post_init__(self) -> None:
        sizes = {"entries": self.entries, "queries": self.queries, "width": self.width}
        at_least(1, **sizes, neighbours=self.neighbours, centres=self.centres, rank=self.rank)
        at_least(1, repeats=self.repeats)


def run(config: StoreBench) -> dict[str, float]:
    """Print milliseconds by name; returns them, and the peer's recalls."""
    torch.manual_seed(0)
    keys, values, queries = (drawn(config, n) for n in (config.entries, config.entries, config.queries))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        calls: dict[str, Callable[[], object]] = {
            f"look up, {name}": functools.partial(_looked_up, name, queries, keys, values, config.neighbours)
            for name in SEARCHES
        }
        calls["store"] = storing(keys, values, queries)
        recalls: dict[str, float] = {}
        if config.peer:
            try:
                peers, recalls = _peer(config, keys, values, queries, Path(folder))
                calls |= peers
            except AbsentError as error:
                print(f"memorizing-transformers: {error}")
        taken = {name: 1e3 * median(seconds) for name, seconds in in_turn(calls, config.repeats).items()}
    for name, milliseconds in taken.items():
        share = f"   recall {recalls[name]:.3f}" if name in recalls else ""
        print(f"{name:<40}{milliseconds:>9.2f} ms{share}")
    return {**taken, **{f"recall, {name}": value for name, value in recalls.items()}}


def drawn(config: StoreBench, count: int) -> Tensor:
    """Unit vectors [1, count, width]."""
    fixed = torch.Generator().manual_seed(2)
    centres = torch.randn(config.centres, config.width, generator=fixed)
    basis = torch.randn(config.rank, config.width, generator=fixed) / config.rank**0.5
    vectors = centres[torch.randint(config.centres, (count,))] + torch.randn(count, config.rank) @ basis
    return F.normalize(vectors, dim=-1).unsqueeze(0)


def storing(keys: Tensor, values: Tensor, new: Tensor) -> Callable[[], object]:
    """A call that appends the new entries to a full store, again and again."""
    size, state = keys.shape[1], [Store()]

    def store() -> None:
        more = new.unsqueeze(0)
        state[0] = state[0].append(more, more, Context(new.shape[1], new.shape[1], causal=True), size)

    state[0] = state[0].append(keys.unsqueeze(0), values.unsqueeze(0), Context(size, size, causal=True), size)
    return store


def _looked_up(name: str, queries: Tensor, keys: Tensor, values: Tensor, count: int) -> object:
    scores, places = SEARCHES[name](queries, keys, count)
    return scores, entries(values, places)


def _peer(
    config: StoreBench, keys: Tensor, values: Tensor, queries: Tensor, folder: Path
) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """The peer's calls by name, and its recalls."""
    exact = SEARCHES["plain"](queries, keys, config.neighbours)[0][0, :, -1]
    calls: dict[str, Callable[[], object]] = {}
    recalls: dict[str, float] = {}
    room = (config.repeats + 2) * config.queries
    store = PublicStore(keys, values, config.neighbours, folder / "entries", room)
    name = "look up, memorizing-transformers"
    recalls[name] = store.recall(queries, exact)
    calls[name] = functools.partial(store.search, queries)
    calls["store, memorizing-transformers"] = functools.partial(store.add, queries)
    wide = PublicStore(keys, values, config.neighbours, folder / "wide", 0)
    width = config.neighbours
    while wide.recall(queries, exact) < config.wanted and width < config.entries:
        width *= 2
        wide.widen(width)
    name = f"look up, the same with efSearch {width}"
    recalls[name] = wide.recall(queries, exact)
    calls[name] = functools.partial(wide.search, queries)
    return calls, recalls
