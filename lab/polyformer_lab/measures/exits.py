"""Generation by a checkpoint with early exits: by confidence, and after the same layer for all tokens."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polyformer.applications.exits import ROWS, RougeL, continuation_generator, exits_of, generate_texts
from polyformer.data.tokenizers.loading import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import from_pretrained
from polyformer.nn.depth import full_depth
from polyformer.nn.depth.exits import Exits
from polyformer.training.tasks.metrics import exp
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.texts import first_ids

Points = Sequence[tuple[float, float]]


@measurement("by", "layers")
def exits(
    cell: Cell,
    model: str,
    text: str,
    texts: int,
    prompt: int,
    new_tokens: int,
    thresholds: Sequence[float],
) -> Iterator[Row]:
    """Yield a row for each way to continue texts, by the layers that a generated token uses.

    consistency: ROUGE-L with the output of the whole model.
    references: ROUGE-L with the original continuation.
    perplexity: of the texts, read in one pass.
    The first row compares consistency at the layers of every exit: `compared`, the number of exits at which
    the line through the thresholds and the whole model has a value, and `lead`, the least difference by which
    the line is higher.

    Args:
        cell: a cell without a recipe.
        model: the folder of a checkpoint with exits.
        text: a file written by a preparation.
        texts: the number of texts that are continued.
        prompt: tokens of each text that are given.
        new_tokens: tokens of each text that are generated.
        thresholds: confidences at which tokens exit.
    """
    decoder, tokenizer = from_pretrained(model), load_tokenizer(model)
    exits_of(decoder)
    assert decoder.decoder is not None
    assert isinstance(decoder.decoder.depth, Exits)
    length = prompt + new_tokens
    ids = torch.tensor(first_ids(text, tokenizer, texts * length)).view(texts, length)
    write, references = continuation_generator(ids.tolist(), prompt, tokenizer.decode)
    continuation_generator(ids[:1].tolist(), prompt, str)[0](decoder)  # the first generation takes longer
    whole = generate_texts(decoder, write, None)

    def row(by: str, threshold: float | Sequence[float] | None) -> Row:
        result = whole if threshold is None else generate_texts(decoder, write, threshold)
        return {
            "by": by,
            "layers": result.layers,
            "threshold": threshold if isinstance(threshold, float) else None,
            "consistency": similarity(whole.texts, result.texts),
            "references": similarity(references, result.texts),
            "perplexity": perplexity(decoder, ids, threshold is None),
            "seconds": result.seconds,
        }

    confident = [row("confidence", threshold) for threshold in (None, *map(float, thresholds))]
    layers = decoder.decoder.depth.layers[:-1]
    fixed = [row("depth", [float(layer != other) for other in layers]) for layer in layers]
    line, points = ([(own["layers"], own["consistency"]) for own in rows] for rows in (confident, fixed))
    leads = [own - value for x, value in points if (own := at(sorted(line), x)) is not None]
    yield {"compared": len(leads), "lead": min(leads, default=None)}
    yield from ({**own, "layers": round(own["layers"], 3)} for own in (*confident, *fixed))


def similarity(targets: Sequence[str], texts: Sequence[str]) -> float:
    """Return the mean ROUGE-L of the texts."""
    return math.fsum(map(RougeL(), targets, texts)) / len(texts)


@torch.no_grad()
def perplexity(model: Transformer, ids: Tensor, whole: bool) -> float:
    """Return the perplexity of rows with the present exits, or without exits (`whole`)."""
    nats, device = 0.0, next(model.parameters()).device
    with full_depth(whole):
        for part in ids.to(device).split(ROWS):
            loss = model(part, labels=part).loss
            assert loss is not None
            nats += float(loss) * len(part)
    return exp(nats / len(ids))


def at(points: Points, x: float) -> float | None:
    """Return the value at x of the line through the points, which rise in x; None outside them."""
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= x <= right:
            return high if left == right else low + (high - low) * (x - left) / (right - left)
    return None
