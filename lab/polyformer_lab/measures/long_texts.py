"""A decoder that reads a text in pieces, also in pieces longer than in training."""

from collections.abc import Iterator, Sequence

from polyformer.cli.commands.before_after import TextMeasurement, measure, text_reader
from polyformer.core.errors import InputError
from polyformer.data.tokenizers.loading import load_tokenizer
from polyformer.models.checkpoints import convert, from_pretrained
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.texts import first_ids


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
