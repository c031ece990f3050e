"""Attention to the slots of a compressive memory, by their age, and texts for which a memory is useful."""

import itertools
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from polyformer.nn.memory.compressive import Compressive
from polyformer.training.recipes.fit import Fitted
from polyformer.training.tasks import LanguageModelling
from polyformer_lab.cells import Cell, Row, measurement, preparation
from polyformer_lab.measures.in_order import perplexity
from polyformer_lab.measures.texts import write_rows

COMMON, OWN = "abcdefgh", "ABCDEFGHIJKLMNOP"


@preparation
def own_letters(folder: Path, train: int, validation: int, length: int, own: int) -> None:
    """Write texts that can be predicted the better, the more of their past is known.

    A quarter of the characters is drawn from `COMMON`, the others from `own` letters of `OWN` that are drawn
    for each text.

    Args:
        folder: the output folder.
        train: the number of training texts.
        validation: the number of held-out texts.
        length: characters of each text.
        own: the number of letters of each text.
    """
    draw = random.Random(0)
    for split, count in (("train", train), ("validation", validation)):
        texts = list[str]()
        for letters in (draw.sample(OWN, own) for _ in range(count)):
            drawn = (draw.choice(COMMON if draw.random() < 0.25 else letters) for _ in range(length))
            texts.append("".join(drawn))
        write_rows(folder, split, texts)


@measurement("part")
def memory_slots(cell: Cell, held_out: int, parts: int, segments: int) -> Iterator[Row]:
    """Yield perplexity, then the mean attention weight of a slot in each part of a compressive memory.

    The parts are numbered from the oldest: the compressed queue first, then the ordinary queue. A
    model with another memory yields perplexity only.

    Args:
        cell: a run that reads texts in order.
        held_out: the number of validation tokens for the perplexity.
        parts: the number of parts of each of the two queues.
        segments: the number of segments with full queues that are read for the weights.
    """
    yield {"perplexity": perplexity(cell.fitted, held_out)}
    decoder = cell.fitted.model.decoder
    assert decoder is not None
    if not isinstance(decoder.memory, Compressive):
        return
    by_segment = [
        [float(part.mean()) for queue in queues for part in queue.tensor_split(parts)]
        for queues in itertools.islice(full_queues(cell.fitted, decoder.memory), segments)
    ]
    for number, weights in enumerate(zip(*by_segment), 1):
        yield {"part": number, "weight": statistics.fmean(weights)}


@torch.no_grad()
def full_queues(fitted: Fitted, memory: Compressive) -> Iterator[tuple[Tensor, ...]]:
    """Yield the attention weights of the slots of both queues, [C] and [M], for each validation segment
    before which the compressed queue is full.

    The weights are means over layers, heads and queries.
    """
    task, model, state = fitted.task, fitted.model.eval(), None
    assert isinstance(task, LanguageModelling)
    assert fitted.splits.validation is not None
    for _, batch in task.held_out(list(fitted.splits.validation), side_by_side=1).batches.epoch(0):
        output = model(**batch, state=state, use_cache=True, output_attentions=True)
        past = state.tokens if state is not None else None
        if past is not None and past.merged == memory.compressed_length:
            # [layers, B, H, T, C + M + T]; queries read all slots of the memory.
            weights = torch.stack(output.attentions)[..., : past.length].mean((0, 1, 2, 3))
            yield weights.tensor_split([past.merged])
        state = output.state
