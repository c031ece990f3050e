"""The time per token of sliding evaluation and of reading with a memory (Dai et al. 2019, table 9)."""

from collections.abc import Callable, Iterator, Sequence

import torch

from polyformer.core.measuring import median, time_interleaved
from polyformer.models.architectures import Transformer
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.generated import Options, created


@measurement("length")
@torch.no_grad()
def sliding_cost(cell: Cell, lengths: Sequence[int], model: Options, repeats: int) -> Iterator[Row]:
    """Yield for each length of attention the milliseconds per token of both, and their factor.

    Args:
        cell: the cell; nothing is trained.
        lengths: tokens of the window, and of a segment and its memory.
        model: a preset of decoders and its options; the memory has positions of Transformer-XL.
        repeats: the timed passes of each.
    """
    for length in lengths:
        window = created(model).eval()
        memory = {"memory": f"recurrent(length={length})", "position": "transformer_xl"}
        reader = created(model, **memory).eval()
        timed = time_interleaved(_passes(window, reader, length), repeats)
        slid, read = median(timed["window"]), median(timed["memory"]) / length
        yield {"length": length, "sliding_ms": 1e3 * slid, "memory_ms": 1e3 * read, "factor": slid / read}


def _passes(window: Transformer, reader: Transformer, length: int) -> dict[str, Callable[[], object]]:
    """Return a pass over `length` tokens without a memory, and a pass with a full memory."""
    ids = torch.zeros(1, length, dtype=torch.long)
    state = reader(ids, use_cache=True).state
    return {"window": lambda: window(ids), "memory": lambda: reader(ids, state=state, use_cache=True)}
