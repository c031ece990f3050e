"""Compare a model before and after a conversion on one text: quality, speed and memory.

The text is cut into pieces of one length, which are read independently. A decoder predicts each token from
the preceding tokens of the piece. An encoder with a masked head predicts 15 % of the tokens, the same ones
before and after. An embedding model computes one vector per piece; the cosine similarity of the two vectors
is reported. If a model cannot read pieces of a length (it has too few positions), the reason is reported
instead. On request a decoder also looks for numbers hidden in the text (`recall`), because perplexity depends
mostly on near tokens.

Recall is the share of numbers, hidden in a text of one length, that a decoder finds.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.applications.probing import ProbeConfig, ProbedModel, ProbeText, probe, read_text
from polyformer.cli.commands.options import parse_lengths
from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import IGNORED
from polyformer.core.measuring import MIB, peak_memory, reset_peak_memory, time_once
from polyformer.data.rows.masking import mask_tokens
from polyformer.data.sources.files import opened
from polyformer.data.tokenizers import load_tokenizer
from polyformer.data.tokenizers.tokenizer import Tokenizer
from polyformer.models.architectures import Transformer
from polyformer.nn.heads import (
    AdaptiveSoftmaxConfig,
    EmbedConfig,
    LanguageModelConfig,
    MaskedConfig,
    PretrainingConfig,
)

WRITES = LanguageModelConfig, AdaptiveSoftmaxConfig
MASKED = MaskedConfig, PretrainingConfig

Piece = dict[str, Tensor]
"""Model inputs for one piece of the text."""


@dataclasses.dataclass(frozen=True, eq=False)
class TextMeasurement:
    """Result of one model on all pieces of one length.

    values: loss in nats of each predicted token [n], or the vectors of the pieces [n, E]. seconds: time to
    read `tokens` tokens. mib: peak memory in addition to the model, on a CPU.
    """

    values: Tensor
    seconds: float
    tokens: int
    mib: float

    @property
    def perplexity(self) -> float:
        """Perplexity of the predicted tokens."""
        return math.exp(float(self.values.double().mean()))


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Results of both models on pieces of one length; a string is the reason why a model cannot read them.

    recall: the shares of hidden numbers that the models find; None for a length that a model cannot read.
    """

    length: int
    before: TextMeasurement | str
    after: TextMeasurement | str
    embeds: bool
    recall: tuple[float | None, float | None] = (None, None)

    @property
    def similarity(self) -> float | None:
        """Mean cosine similarity of the vectors before and after; None unless both models embed."""
        if not self.embeds or isinstance(self.before, str) or isinstance(self.after, str):
            return None
        return float(F.cosine_similarity(self.before.values, self.after.values).mean())

    @property
    def quality(self) -> float:
        """Similarity of the vectors, or ratio of the perplexities, after to before, if both models read."""
        if self.similarity is not None:
            return self.similarity
        assert isinstance(self.before, TextMeasurement)
        assert isinstance(self.after, TextMeasurement)
        return self.after.perplexity / self.before.perplexity


def compare(
    before: Transformer,
    after: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    lengths: Sequence[int],
    tokens: int,
) -> Iterator[Comparison]:
    """Yield the comparison at each length, over at most `tokens` tokens of the text `ids` but at least one
    piece.

    Raises:
        InputError: The head neither predicts tokens nor embeds, or the text is shorter than a length.
    """
    read = text_reader(before, tokenizer)
    for length in lengths:
        pieces = [*read.pieces(ids, length, max(1, tokens // length))]
        if not pieces:
            raise InputError(
                f"the text has {len(ids)} tokens, too few for a length of {length}; "
                "use a longer text or a smaller length"
            )
        results = [measure(model, read, pieces, length) for model in (before, after)]
        yield Comparison(length, *results, embeds=read.embeds)


@dataclasses.dataclass(frozen=True)
class TextReader:
    """Functions that cut a text into pieces and evaluate a piece, for one kind of head."""

    pieces: Callable[[Sequence[int], int, int], Iterator[Piece]]
    values: Callable[[Transformer, Piece], Tensor]
    embeds: bool = False


def text_reader(model: Transformer, tokenizer: Tokenizer) -> TextReader:
    """Return the reader for the head of `model`; raise `InputError` for a head that needs labelled data."""
    head = model.config.head
    if model.encoder is None and isinstance(head, WRITES):
        return TextReader(causal_pieces, nats)
    if model.decoder is None and isinstance(head, MASKED):
        if tokenizer.mask_id is None:
            raise InputError(
                "tokenizer: it has no <mask> token, which the evaluation of a masked head requires"
            )
        return TextReader(partial(masked_pieces, tokenizer), nats)
    if model.decoder is None and isinstance(head, EmbedConfig):
        return TextReader(partial(framed_pieces, tokenizer), vectors, embeds=True)
    raise InputError(
        f"a model with the head {quote(head.kind)} cannot be evaluated on plain text; expected a decoder "
        "language model, a masked language model or an embedding model (for example --head masked)"
    )


def causal_pieces(ids: Sequence[int], length: int, number: int) -> Iterator[Piece]:
    """Yield pieces of `length` tokens, with the next token of each position as its label."""
    for start in range(0, min(number * length, len(ids) - length), length):
        piece = torch.tensor([ids[start : start + length + 1]])
        yield {"input_ids": piece[:, :-1], "shift_labels": piece[:, 1:]}


def framed_pieces(tokenizer: Tokenizer, ids: Sequence[int], length: int, number: int) -> Iterator[Piece]:
    """Yield at most `number` pieces <cls> tokens <sep> of `length` tokens in total."""
    first, last = ([x for x in (token,) if x is not None] for token in (tokenizer.cls_id, tokenizer.sep_id))
    step = length - len(first) - len(last)
    if step < 1:
        raise InputError(f"length: expected more than the special tokens around a text, got {length}")
    for start in range(0, min(number * step, len(ids) - step + 1), step):
        yield {"input_ids": torch.tensor([[*first, *ids[start : start + step], *last]])}


def masked_pieces(tokenizer: Tokenizer, ids: Sequence[int], length: int, number: int) -> Iterator[Piece]:
    """Yield framed pieces with labels for 15 % of the tokens, masked: the same tokens for both models."""
    assert tokenizer.mask_id is not None
    generator = np.random.default_rng(0)
    for piece in framed_pieces(tokenizer, ids, length, number):
        masked, labels = mask_tokens(
            piece["input_ids"][0].numpy(),
            generator,
            mask_id=tokenizer.mask_id,
            ordinary_ids=tokenizer.ordinary_ids,
            random_share=0.0,
            kept_share=0.0,
        )
        yield {"input_ids": torch.from_numpy(masked)[None], "labels": torch.from_numpy(labels)[None]}


def nats(model: Transformer, piece: Piece) -> Tensor:
    """Return the mean loss of a piece, repeated for each predicted token [n], so that means weight tokens."""
    labels = piece["shift_labels" if "shift_labels" in piece else "labels"]
    loss = model(**piece).loss
    assert loss is not None
    return loss.float().expand(int((labels != IGNORED).sum()))


def vectors(model: Transformer, piece: Piece) -> Tensor:
    """Return the vector of a piece [1, E]."""
    return model(**piece).logits.float()


@torch.no_grad()
def measure(
    model: Transformer, read: TextReader, pieces: Sequence[Piece], length: int
) -> TextMeasurement | str:
    """Return values, time and memory over `pieces`, or the reason why the model cannot read them."""
    values: list[Tensor] = []
    model.eval()
    resident = reset_peak_memory()
    try:
        seconds = time_once(lambda: values.extend(read.values(model, piece) for piece in pieces))
    except InputError as error:
        return str(error)
    return TextMeasurement(torch.cat(values), seconds, length * len(pieces), (peak_memory() - resident) / MIB)


def comparison_table(rows: Sequence[Comparison]) -> list[str]:
    """Return the lines of a table with one row per length, before and after."""
    embeds = any(row.embeds for row in rows)
    kind = "similarity" if embeds else "perplexity"
    recalls = any(share is not None for row in rows for share in row.recall)
    heading = f"  {'recall':>16}" if recalls else ""
    lines = [f"  length  {kind:>19}  {'tokens/s':>17}  {'extra memory (MiB)':>18}{heading}"]
    for row in rows:
        sides = row.before, row.after
        if embeds:
            quality = "-" if row.similarity is None else f"{row.similarity:.4f}"
        else:
            quality = _both(sides, lambda side: f"{side.perplexity:.2f}")
        speed = _both(sides, lambda side: f"{side.tokens / side.seconds:,.0f}")
        memory = _both(sides, lambda side: f"{side.mib:,.0f}")
        shares = " -> ".join("-" if share is None else f"{share:.1%}" for share in row.recall)
        column = f"  {shares:>16}" if recalls else ""
        lines.append(f"{row.length:8,}  {quality:>19}  {speed:>17}  {memory:>18}{column}")
    for name in ("before", "after"):
        reasons = dict.fromkeys(side for row in rows if isinstance(side := getattr(row, name), str))
        lines += [f"{name}, -: {reason}" for reason in reasons]
    return lines


def _both(
    sides: tuple[TextMeasurement | str, TextMeasurement | str], text: Callable[[TextMeasurement], str]
) -> str:
    return " -> ".join("-" if isinstance(side, str) else text(side) for side in sides)


def quality_losses(rows: Sequence[Comparison], tolerance: float) -> list[str]:
    """Return a description of each quality loss beyond `tolerance`; an empty list if there is none.

    The new perplexity may be up to (1 + tolerance) times the original perplexity at the same length, or at
    the longest length that the original model can read. A similarity may be 1 - tolerance or more, and a
    recall may be lower by `tolerance`.
    """
    faults: list[str] = []
    reference: float | None = None
    for row in sorted(rows, key=lambda row: row.length):
        if isinstance(row.before, TextMeasurement) and not row.embeds:
            reference = row.before.perplexity
        if isinstance(row.after, str):
            faults.append(f"the new model cannot read {row.length:,} tokens")
        elif row.similarity is not None and row.similarity < 1 - tolerance:
            faults.append(f"vectors of {row.length:,} tokens have a similarity of {row.similarity:.4f}")
        elif not row.embeds and reference and row.after.perplexity > (1 + tolerance) * reference:
            ratio = row.after.perplexity / reference
            faults.append(f"perplexity at {row.length:,} tokens is {ratio:.3f} times the original")
        old, new = row.recall
        if old is not None and new is not None and new < old - tolerance:
            faults.append(
                f"of the numbers hidden in {row.length:,} tokens it finds {new:.1%}, before {old:.1%}"
            )
    return faults


LONGEST = 4096
"""Largest default length of the pieces of text."""

CHARACTERS = 32
"""Characters of the text to read per required token."""


def check_evaluation(options: Any, model: Transformer) -> None:
    """Raise `InputError` for invalid options of --evaluate before anything is written."""
    if not Path(options.evaluate).is_file():
        raise InputError(f"--evaluate: {options.evaluate}: no such file")
    tokenizer = load_tokenizer(options.folder)
    if options.recall is not None:
        ProbedModel.of(model, tokenizer)
    text_reader(model, tokenizer)
    lengths = _lengths(options, model)
    if options.lengths is not None and (count := len(_ids(options, tokenizer, lengths))) <= lengths[-1]:
        raise InputError(
            f"--lengths: {options.evaluate} has {count} tokens, too few for a length of {lengths[-1]}; use a "
            "longer text or smaller lengths"
        )


def show_evaluation(options: Any, before: Transformer, after: Transformer) -> None:
    """Print the comparison; exit with status 1 if the quality loss exceeds the tolerance."""
    lengths, tokenizer = _lengths(options, before, after), load_tokenizer(options.folder)
    ids = _ids(options, tokenizer, lengths)
    if options.lengths is None:  # limited by the length of the text
        lengths = [length for length in lengths if length < len(ids)] or lengths[:1]
    rows = list(compare(before, after, tokenizer, ids, lengths, options.tokens))
    if options.recall is not None:
        find = partial(recall, tokenizer, read_text(options.evaluate, "text"), options.recall)
        rows = [
            dataclasses.replace(row, recall=(find(before, row.length), find(after, row.length)))
            for row in rows
        ]
    print("\n".join(["", f"{options.evaluate}, before -> after:", *comparison_table(rows)]))
    within = f"--tolerance {options.tolerance:g}"
    if faults := quality_losses(rows, options.tolerance):
        print(f"quality lost: {'; '.join(faults)} ({within}); train the model further")
        raise SystemExit(1)
    print(f"quality kept: all changes are within {within}")


def _ids(options: Any, tokenizer: Tokenizer, lengths: list[int]) -> list[int]:
    """Return the required tokens of the text, or all of them if there are fewer."""
    with opened(Path(options.evaluate)) as file:
        return tokenizer.encode(file.read(CHARACTERS * max(options.tokens, *lengths)))


def _lengths(options: Any, *models: Transformer) -> list[int]:
    """Return the lengths in tokens: --lengths, or the number of positions of each model."""
    if options.lengths is None:
        return sorted({min(model.config.max_position_embeddings, LONGEST) for model in models})
    return parse_lengths(options.lengths)


NEW_TOKENS = 32
"""Tokens in which the number must be found, so that a comparison takes minutes."""


def recall(
    tokenizer: Tokenizer, text: ProbeText, samples: int, model: Transformer, length: int
) -> float | None:
    """Return the share of numbers that a decoder finds, each hidden in a prompt of `length` tokens of `text`.

    None for a length that is too long for the model or too short for the prompt.
    """
    config = ProbeConfig(samples=samples, max_new_tokens=NEW_TOKENS)
    try:
        (result,) = probe(probed(model, tokenizer), ["niah_single_2"], [length], text, config)
    except InputError:
        return None
    return result.score


def probed(model: Transformer, tokenizer: Tokenizer) -> ProbedModel:
    """Return the view of a decoder that reads prompts with the first token of its training."""
    begin = list[int]()
    if model.config.origin is None and tokenizer.backend.post_processor is None:
        begin = [token for token in (tokenizer.bos_id,) if token is not None]  # as the task lm
    return ProbedModel.of(model, tokenizer, lambda prompt: [*begin, *tokenizer.encode_prompt(prompt)])
