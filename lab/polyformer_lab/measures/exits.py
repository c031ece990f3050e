"""Early exits: by confidence, after the same layer for all tokens, by other rules, at chosen thresholds.

Rules are compared at equal risk, by the layers that each saves in the same model. Thresholds of a translation
model are chosen on the validation set (Elbayad et al. 2020, section 5).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from polyformer.applications.exits import (
    ROWS,
    RougeL,
    continuation_generator,
    exits_of,
    generate_texts,
    translation_generator,
)
from polyformer.core.errors import InputError
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import from_pretrained
from polyformer.models.generation import BeamConfig
from polyformer.nn.depth import full_depth, recorded_depths
from polyformer.nn.depth.exits import Exits, set_threshold
from polyformer.nn.depth.exits.rules import ExitRuleConfig
from polyformer.training.tasks import Translation
from polyformer.training.tasks.text import exp
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.long_texts import first_tokens
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


BISECTIONS = 14
"""Halvings of the interval of thresholds from 0 to 1."""

Scored = tuple[float, float]
"""The share of tokens with another prediction than the whole model's, and the layers per token."""


@measurement("rule")
def exit_rules(cell: Cell, rules: list[str], risk: float, held_out: int, length: int) -> Iterator[Row]:
    """Yield for each rule the layers per token at the lowest threshold with at most `risk`.

    The risk is the share of next tokens that are predicted otherwise than by the whole model. The threshold
    is chosen on the first half of the held-out tokens, and the row is of the second half.

    Args:
        cell: a run with exits; the rule of its model must be among `rules` if it has weights.
        rules: names of rules.
        risk: the largest share.
        held_out: the number of validation tokens.
        length: tokens per row.
    """
    model = cell.fitted.model.eval()
    assert model.decoder is not None
    exits = model.decoder.depth
    if not isinstance(exits, Exits):
        raise InputError("model.depth: expected exits; set it to 'exits'")
    trained = exits.rule
    chosen_on, tested_on = first_tokens(cell.fitted, held_out).view(-1, length).chunk(2)
    for name in rules:
        same = name == exits.config.rule.kind
        config = ExitRuleConfig.from_dict(name, "rule")
        exits.rule = trained if same else config.build(model.config.hidden_size, len(exits.layers))
        threshold = lowest(scorer(model, chosen_on), risk)
        other, layers = scorer(model, tested_on)(threshold)
        yield {"rule": name, "threshold": threshold, "risk": other, "layers": layers}
    exits.rule = trained


def scorer(model: Transformer, ids: Tensor) -> Callable[[float], Scored]:
    """Return a function that scores a threshold on rows of ids [B, n], read in one pass."""

    @torch.no_grad()
    def choices(within: AbstractContextManager[None]) -> Tensor:
        with within:
            return model(ids).logits.argmax(-1)

    whole = choices(full_depth(True))

    def score(threshold: float) -> Scored:
        set_threshold(model, threshold)
        with recorded_depths() as depths:
            own = choices(nullcontext())
        return float((own != whole).double().mean()), float(depths[0].double().mean())

    return score


def lowest(score: Callable[[float], Scored], risk: float) -> float:
    """Return the lowest threshold with at most `risk`, by bisection: the risk falls as thresholds rise."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if score(middle)[0] <= risk else (middle, high)
    return high


Thresholds = float | tuple[float, ...]
"""One threshold for all exits, or a threshold for each."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of a way to translate: BLEU, layers per token, and seconds."""

    bleu: float
    layers: float
    seconds: float = 0.0


@measurement("way")
def exit_thresholds(
    cell: Cell, thresholds: Sequence[float], sweeps: int, sentences: int, margin: float
) -> Iterator[Row]:
    """Yield BLEU and layers of the test sentences for each way to translate.

    The ways are the `whole` model, the `threshold` for all exits and the `thresholds` for each exit that
    validation chooses, and all tokens leaving `after` the same layer, which is a smaller depth that is fixed
    beforehand. If no threshold is within the margin, the row `threshold` has no figures.

    Args:
        cell: the cell.
        thresholds: the candidates.
        sweeps: passes over the exits, to choose a threshold for each.
        sentences: the most sentences of validation and test.
        margin: BLEU that may be lost in validation.
    """
    fitted = cell.fitted
    task, model, splits = fitted.task, fitted.model, fitted.splits
    assert isinstance(task, Translation)
    validation, test = (
        [dict(row) for row in itertools.islice(rows or (), sentences)]
        for rows in (splits.validation, splits.test)
    )

    def tried(values: Thresholds) -> Scores:
        return scores(task, model, validation, values)

    whole = scores(task, model, test, None)
    yield {"way": "whole", **dataclasses.asdict(whole)}
    least = scores(task, model, validation, None).bleu - margin
    searched = {threshold: tried(threshold) for threshold in thresholds}
    chosen = choose(searched, least)
    exits = round(whole.layers) - 1
    if chosen is None:
        yield {"way": "threshold", "bleu": None, "layers": None}
    else:
        own = each((chosen,) * exits, searched[chosen], thresholds, sweeps, tried, least)
        for way, values in (("threshold", chosen), ("thresholds", own)):
            text = " ".join(map(str, values if isinstance(values, tuple) else (values,)))
            measured = dataclasses.asdict(scores(task, model, test, values))
            yield {"way": way, **measured, "chosen": text}
    for layer in range(1, exits + 1):
        at = tuple(float(exit != layer) for exit in range(1, exits + 1))
        yield {"way": f"after {layer}", **dataclasses.asdict(scores(task, model, test, at))}


def scores(
    task: Translation, model: Any, rows: Sequence[Mapping[str, str]], thresholds: Thresholds | None
) -> Scores:
    """Return the scores of greedy translations with exits at the thresholds; None for the whole model."""
    import sacrebleu

    sources, references = ([row[side] for row in rows] for side in ("source", "target"))
    result = generate_texts(model, translation_generator(Greedy(task), sources), thresholds)
    return Scores(sacrebleu.corpus_bleu(result.texts, [references]).score, result.layers, result.seconds)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """A task that translates greedily, without beam search."""

    task: Translation

    def translate(self, model: Transformer, texts: Sequence[str]) -> list[str]:
        """Return the translation of each text."""
        return self.task.translate(model, texts, BeamConfig(num_beams=1))


def choose(searched: Mapping[float, Scores], least: float) -> float | None:
    """Return the threshold with the fewest layers and a BLEU of at least `least`, or None."""
    good = [(value.layers, threshold) for threshold, value in searched.items() if value.bleu >= least]
    return min(good)[1] if good else None


def each(
    start: tuple[float, ...],
    value: Scores,
    thresholds: Sequence[float],
    sweeps: int,
    tried: Callable[[Thresholds], Scores],
    least: float,
) -> tuple[float, ...]:
    """Return a threshold for each exit.

    It starts from `start`, which has the scores `value`, and sets exit by exit the threshold with the fewest
    layers and a BLEU of at least `least`, with the other thresholds unchanged.
    """
    best = start
    for number in list(range(len(start))) * sweeps:
        for threshold in thresholds:
            others = (*best[:number], threshold, *best[number + 1 :])
            if others == best:
                continue
            other = tried(others)
            if other.bleu >= least and other.layers < value.layers:
                best, value = others, other
    return best
