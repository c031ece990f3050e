"""Long texts, read in segments, in pieces, or in order with memories and stores.

Perplexity is of one held-out text: in segments of several lengths, which a model reads independently; in
pieces longer than in training; and in order, with memories and stores of several lengths. The attention to
the slots of a compressive memory is measured by their age.
"""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.cli.commands.before_after import TextMeasurement, measure, text_reader
from polyformer.core.errors import InputError
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import convert, from_pretrained
from polyformer.nn.memory.base import set_length
from polyformer.nn.memory.compressive import Compressive
from polyformer.nn.memory.memorizing import set_store
from polyformer.training.recipes.fit import Fitted
from polyformer.training.tasks import LanguageModelling
from polyformer.training.tasks.lm import LanguageModellingConfig
from polyformer.training.tasks.text import exp
from polyformer_lab.cells import Cell, Row, measurement, preparation
from polyformer_lab.measures.texts import first_ids, write_rows


@measurement("length")
def segments(cell: Cell, lengths: Sequence[int], held_out: int) -> Iterator[Row]:
    """Yield the perplexity of the first `held_out` validation tokens by the length of the segments."""
    ids = first_tokens(cell.fitted, held_out)
    for length in lengths:
        yield {"length": length, "perplexity": segment_perplexity(cell.fitted.model, ids, length)}


def first_tokens(fitted: Fitted, most: int) -> Tensor:
    """Return the first `most` tokens of the validation text as a stream, [N]."""
    assert isinstance(fitted.task, LanguageModelling)
    assert fitted.splits.validation is not None
    documents = fitted.task.rows.documents(list(fitted.splits.validation))
    return torch.tensor(list(itertools.islice(itertools.chain.from_iterable(documents), most)))


@torch.no_grad()
def segment_perplexity(model: Transformer, ids: Tensor, length: int) -> float | None:
    """Return exp of the mean nats over all `ids` [N] except the first; None for more tokens than positions.

    A segment of `length` tokens begins with the last token of the segment before: every token is predicted
    once, from at most length - 1 others.
    """
    assert model.decoder is not None
    limit = model.decoder.position.max_positions
    if limit is not None and length > limit:
        return None
    model.eval()
    nats = 0.0
    for batch in batches(ids.to(next(model.parameters()).device), length):
        nats += float(model(input_ids=batch, labels=batch).loss) * batch[:, 1:].numel()
    return exp(nats / (len(ids) - 1))


def batches(ids: Tensor, length: int, batch_tokens: int = 4096) -> Iterator[Tensor]:
    """Yield batches of whole segments [B, length], then the remaining tokens [1, R]."""
    whole = ids.unfold(0, length, length - 1) if len(ids) >= length else ids.new_empty(0, length)
    if len(whole):
        yield from whole.split(max(1, batch_tokens // length))
    rest = ids[len(whole) * (length - 1) :]
    if len(rest) > 1:
        yield rest.unsqueeze(0)


@measurement("length")
def pieces(
    cell: Cell,
    model: str,
    text: str,
    lengths: Sequence[int],
    tokens: int,
    attention: str | None = None,
    extension: str | None = None,
    memory: str | None = None,
    own: int | None = None,
) -> Iterator[Row]:
    """Yield the perplexity, the speed and the memory at each length, after a row with two of the
    perplexities.

    These are `known`, at the longest length that the checkpoint was trained for, and `longest`.

    Args:
        cell: its run is measured; without a recipe the checkpoint, converted.
        model: the folder of the checkpoint.
        text: a file written by a preparation.
        lengths: tokens in a piece.
        tokens: the number of tokens that are read at each length.
        attention: the attention of the converted checkpoint, by default its own.
        extension: the extension of rotary positions ("yarn"), for the longest of the lengths.
        memory: a memory of the converted checkpoint ("sinks(first=4, length=508)").
        own: the length that the checkpoint was trained for; by default its number of positions.
    """
    checkpoint, tokenizer = from_pretrained(model).eval(), load_tokenizer(model)
    read, ids = text_reader(checkpoint, tokenizer), first_ids(text, tokenizer, tokens + 1)
    own = own or checkpoint.config.max_position_embeddings
    if cell.recipe is not None:
        checkpoint = cell.fitted.model
    elif attention or extension or memory:
        slower = extension and slowed(extension, own, max(lengths))
        checkpoint, _ = convert(checkpoint, attention, extension=slower, memory=memory)
    rows = dict[int, Row]()
    for length in lengths:
        result = measure(checkpoint, read, [*read.pieces(ids, length, tokens // length)], length)
        if not isinstance(result, TextMeasurement):
            raise InputError(f"{cell.title}, {length} tokens: {result}")
        speed = result.tokens / result.seconds
        rows[length] = {"perplexity": result.perplexity, "tokens_per_second": speed, "mib": result.mib}
    known = max((length for length in lengths if length <= own), default=min(lengths))
    yield {"known": rows[known]["perplexity"], "longest": rows[max(lengths)]["perplexity"]}
    yield from ({"length": length, **row} for length, row in rows.items())


def slowed(extension: str, own: int, longest: int) -> str:
    """Return an extension with the factor from the length of training to the longest."""
    original = f", original_max_positions={own}" if extension == "yarn" else ""
    return f"{extension}(factor={longest / own}{original})"


CONVERTED = "converted"
"""The folder, within the run's folder, of its model with another memory."""


@measurement()
def in_order(cell: Cell, held_out: int) -> Row:
    """Return the perplexity of the first `held_out` tokens of the validation text."""
    return {"perplexity": perplexity(cell.fitted, held_out)}


@measurement("memory", "overlap")
def in_order_by_memory(
    cell: Cell, held_out: int, memories: Sequence[int] = (), overlaps: Sequence[int] = ()
) -> Iterator[Row]:
    """Yield the perplexity with a memory of each length, or in rows that repeat the same number of tokens."""
    for length in memories:
        set_length(cell.fitted.model, length)
        yield {"memory": length, "perplexity": perplexity(cell.fitted, held_out)}
    for overlap in overlaps:
        yield {"overlap": overlap, "perplexity": perplexity(cell.fitted, held_out, overlap)}


@measurement("store")
def in_order_by_store(
    cell: Cell, held_out: int, stores: Sequence[int] = (), convert_to: str | None = None
) -> Iterator[Row]:
    """Yield the perplexity with a store of each size, 0 for a model without a store.

    Args:
        cell: a run.
        held_out: the number of tokens to read.
        stores: the sizes, in entries; empty for a model without a store.
        convert_to: a memory; the model converted to it is saved in the run's folder `converted`.
    """
    for size in stores:
        set_store(cell.fitted.model, size)
        yield {"store": size, "perplexity": perplexity(cell.fitted, held_out)}
    if not stores:
        yield {"store": 0, "perplexity": perplexity(cell.fitted, held_out)}
    if convert_to is not None:
        convert(cell.fitted.model, memory=convert_to)[0].save_pretrained(cell.folder / CONVERTED)


@torch.no_grad()
def perplexity(fitted: Fitted, most: int, overlap: int = 0) -> float:
    """Return the perplexity of the first validation documents, at least `most` tokens.

    The documents are read in order; with an overlap, in rows that repeat this number of tokens of the row
    before.
    """
    task = fitted.task
    assert isinstance(task, LanguageModelling)
    assert fitted.splits.validation is not None
    if overlap:
        options = dataclasses.replace(task.config, feed="packed", overlap=overlap)
        task = LanguageModelling(options, task.tokenizer)
    held: list[Any] = list(fitted.splits.validation)
    rows, tokens = list[Any](), 0
    while held and tokens < most:
        rows.append(held.pop(0))
        tokens += len(task.rows.documents(rows[-1:])[0])
    return task.metrics.measure(fitted.model.eval(), task.rows.held_out(rows))["perplexity"]


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
    for _, batch in task.rows.held_out(list(fitted.splits.validation), side_by_side=1).batches.epoch(0):
        output = model(**batch, state=state, use_cache=True, output_attentions=True)
        past = state.tokens if state is not None else None
        if past is not None and past.merged == memory.compressed_length:
            # [layers, B, H, T, C + M + T]; queries read all slots of the memory.
            weights = torch.stack(output.attentions)[..., : past.length].mean((0, 1, 2, 3))
            yield weights.tensor_split([past.merged])
        state = output.state


@measurement("store")
def store_sizes(
    cell: Cell, model: str, text: str, tokens: int, memory: str, length: int, stores: Sequence[int]
) -> Iterator[Row]:
    """Yield the perplexity of a text by the number of entries of the store.

    Args:
        cell: its run is measured; without a recipe the converted checkpoint, which is saved in its folder.
        model: the folder of the checkpoint.
        text: a file written by a preparation.
        tokens: the number of tokens that are predicted.
        memory: the memory that is added to the checkpoint.
        length: tokens of a segment.
        stores: sizes, in entries.
    """
    if cell.recipe is None:
        reader, _ = convert(from_pretrained(model), memory=memory)
        reader.save_pretrained(cell.folder / "model")
    else:
        reader = cell.fitted.model
    tokenizer = load_tokenizer(model)
    bos = LanguageModelling(LanguageModellingConfig(), tokenizer).rows.bos
    ids = torch.tensor([[bos, *first_ids(text, tokenizer, tokens)]])
    for size in stores:
        set_store(reader, size)
        yield {"store": size, "perplexity": store_perplexity(reader, ids, length)}


@torch.no_grad()
def store_perplexity(model: Transformer, ids: Tensor, length: int) -> float:
    """Return the perplexity of ids [1, n + 1] in segments, each with the state of the segment before."""
    device, state, nats = next(model.parameters()).device, None, 0.0
    model.eval()
    goals = ids[:, 1:].to(device)
    for segment, following in zip(ids[:, :-1].to(device).split(length, 1), goals.split(length, 1)):
        output = model(segment, shift_labels=following, state=state, use_cache=True)
        assert output.loss is not None
        nats += float(output.loss) * following.numel()
        state = output.state
    return exp(nats / goals.numel())
