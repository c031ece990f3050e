"""Generated tasks with a structure: strings that are copied, and rows of segments with questions.

Encoder-decoders copy or reverse strings of digits or add numbers, and are tested on longer strings.

Encoders answer questions about facts: every segment of a row has a global token, its question.

    question 5   question 2   | 5=1  7=0  2=3 |  2=6  5=4  7=7 |
    segment 0    segment 1      segment 0        segment 1

A fact is a single token for a key and a value; the answer to "question 5" is the value of key 5 in the place
that the questions are about.

In rows of several reviews the global token names the label of its review.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from polyformer.core.sequence.tokens import Tokens
from polyformer.data import Collate, Tokenizer
from polyformer.data.rows.structured import structured
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelOutput
from polyformer.training import Batch
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.layers import RecurrentWriter
from polyformer_lab.measures.generated import HELD_OUT, Options, created, tagger, trained
from polyformer_lab.measures.texts import TEST, TRAIN, Labelled, read_texts
from polyformer_lab.string_tasks import END, PAD, START, STRINGS, VOCABULARY

RECURRENT = "recurrent"
"""The name of recurrent encoder-decoders in the place of a preset."""


class FromPosition(nn.Module):
    """An encoder-decoder with a source and a target that begin at the position `start`."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, labels: Tensor, start: Tensor) -> ModelOutput:
        """Return loss and predictions for sources [B, S] and targets [B, T]."""
        first = int(start)
        pos = torch.arange(first, first + source.shape[1], device=source.device)
        state = self.model.encode(source, position_ids=pos)
        state = dataclasses.replace(state, tokens=Tokens(0, dropped=first))
        target = self.model.shifted_right(labels, None)
        return self.model(decoder_input_ids=target, labels=labels, state=state)


@measurement("digits")
def strings(
    cell: Cell,
    task: str,
    model: Options,
    length: int,
    lengths: Sequence[int],
    positions: int,
    rows: int,
    tested: int,
    steps: int,
    lr: float,
) -> Iterator[Row]:
    """Yield for each length the shares of target tokens and of whole strings that are predicted.

    Each token is predicted after the true tokens before it: the model generates a string if it predicts all
    tokens of the string.

    Args:
        cell: the cell; its folder gets the training.
        task: "copy", "reverse" or "add".
        model: a preset and its options, or `RECURRENT` and the options of `RecurrentWriter`.
        length: digits of the longest source in training.
        lengths: digits of the test sources, the same strings for every model.
        positions: the positions that occur in training.
        rows: strings in a batch.
        tested: test strings of each length.
        steps: training steps.
        lr: the highest learning rate.
    """

    def drawn(generator: torch.Generator) -> Batch:
        digits = int(torch.randint(1, length + 1, (), generator=generator))
        return placed(task, digits, rows, positions, generator)

    writer = trained(cell, lambda: writer_of(model), drawn, steps, lr)
    for digits in lengths:
        batch = placed(task, digits, tested, positions, torch.Generator().manual_seed(digits))
        with torch.no_grad():
            right = writer(**batch).logits.argmax(-1) == batch["labels"]
        tokens, whole = right.float().mean(), right.all(1).float().mean()
        yield {"digits": digits, "tokens": float(tokens), "strings": float(whole)}


def writer_of(model: Options) -> nn.Module:
    """Return an encoder-decoder of strings with fresh weights, recurrent or a Transformer."""
    if model["preset"] == RECURRENT:
        options = {name: value for name, value in model.items() if name != "preset"}
        return RecurrentWriter(VOCABULARY, START, **options)
    return FromPosition(created(model, vocab_size=VOCABULARY, pad=PAD, bos=START, eos=END))


def placed(task: str, digits: int, rows: int, positions: int, generator: torch.Generator) -> Batch:
    """Return strings of one length, and the positions where they begin."""
    source, target = STRINGS[task](rows, digits, generator)
    longest = max(source.shape[1], target.shape[1])
    start = torch.randint(0, max(1, positions - longest), (), generator=generator)
    return {"source": source, "labels": target, "start": start}


@measurement()
def segment_facts(
    cell: Cell, model: Options, facts: Options, rows: int, tested: int, steps: int, lr: float
) -> Row:
    """Return the share of right answers.

    Args:
        cell: the cell; its folder gets the training.
        model: a preset and its options; its pattern has as many global tokens as a row has segments.
        facts: the arguments of `drawn`.
        rows: rows in a batch.
        tested: the number of test rows.
        steps: training steps.
        lr: the highest learning rate.
    """
    encoder = trained(
        cell,
        lambda: facts_encoder(model, **facts),
        lambda generator: drawn(rows, generator, **facts),
        steps,
        lr,
    )
    batch = drawn(tested, torch.Generator().manual_seed(HELD_OUT), **facts)
    with torch.no_grad():
        right = encoder(**batch).logits.argmax(-1) == batch["labels"]
    return {"accuracy": float(right[:, : facts["segments"]].float().mean())}


def facts_encoder(model: Options, segments: int, length: int, values: int, place: str) -> Transformer:
    """Return an encoder with fresh weights that names a value at every token."""
    return tagger(model, segments * length * (values + 1), values)


def drawn(
    rows: int,
    generator: torch.Generator,
    *,
    segments: int,
    length: int,
    values: int,
    place: Literal["own", "other"],
) -> Batch:
    """Return rows of segments of facts, with a question before them for each segment.

    The fact "key k has the value v" is token `values` k + v, and tokens after all facts are the questions.

    Args:
        rows: rows in the batch.
        generator: the source of random numbers.
        segments: segments in a row.
        length: facts in a segment.
        values: the number of values.
        place: "own": all segments have facts about the same keys, each with its own values, and a question is
            about its own segment. "other": every key occurs once in a row, and a question is about another
            segment.
    """
    keys = torch.rand(rows, segments * length, generator=generator).argsort(1).view(rows, segments, length)
    own, shift = torch.arange(segments), torch.zeros(rows, segments, dtype=torch.long)
    if place == "own":
        order = torch.rand(rows, segments, length, generator=generator).argsort(2)
        keys = keys[:, :1].expand(-1, segments, -1).gather(2, order)
    else:
        shift = torch.randint(1, segments, (rows, segments), generator=generator)
    answers = torch.randint(values, keys.shape, generator=generator)
    asked = (own + shift) % segments * length
    asked += torch.randint(length, (rows, segments), generator=generator)
    question, answer = (each.flatten(1).gather(1, asked) for each in (keys, answers))
    text, unlabelled = (keys * values + answers).flatten(1), torch.full((rows, segments * length), -100)
    numbers = torch.cat([own, own.repeat_interleave(length)])
    return {
        "input_ids": torch.cat([segments * length * values + question, text], 1),
        "segment_ids": numbers.expand(rows, -1),
        "token_type_ids": (torch.arange(len(numbers)) >= segments).long().expand(rows, -1),
        "labels": torch.cat([answer, unlabelled], 1),
    }


@measurement()
def segment_reviews(
    cell: Cell, model: Options, folder: str, segments: int, rows: int, steps: int, lr: float
) -> Row:
    """Return the share of test reviews with the right label.

    Args:
        cell: the cell; its folder gets the training.
        model: a preset and its options; its pattern has `segments` global tokens.
        folder: a set of texts that `labelled` prepared, with the labels 0 and 1.
        segments: reviews in a row, drawn at random.
        rows: rows in a batch.
        steps: training steps.
        lr: the highest learning rate.
    """
    tokenizer = load_tokenizer(folder)
    train, test = (Reviews(read_texts(Path(folder, file)), tokenizer) for file in (TRAIN, TEST))

    def drawn(generator: torch.Generator) -> Batch:
        return train.batch(torch.randint(len(train.labels), (rows, segments), generator=generator))

    encoder = trained(cell, lambda: tagger(model, len(tokenizer), 2), drawn, steps, lr)
    order = torch.randperm(len(test.labels), generator=torch.Generator().manual_seed(HELD_OUT))
    order, right = order[: len(order) // segments * segments].view(-1, segments), 0
    for numbers in order.split(50):
        batch = test.batch(numbers)
        with torch.no_grad():
            predicted = encoder(**batch).logits.argmax(-1)
        right += int((predicted == batch["labels"]).sum())  # other tokens have the label -100
    return {"accuracy": right / order.numel()}


class Reviews:
    """Token ids and labels of texts."""

    def __init__(self, texts: Labelled, tokenizer: Tokenizer):
        assert tokenizer.cls_id is not None
        self.global_id, self.pad_id = tokenizer.cls_id, tokenizer.pad_id or 0
        self.ids = tokenizer.encode_batch([text for text, _ in texts])
        self.labels = torch.tensor([int(label) for _, label in texts])

    def batch(self, numbers: Tensor) -> Batch:
        """Return rows of the reviews of these numbers, [R, S]."""
        segments = numbers.shape[1]
        rows = [[self.ids[number] for number in row] for row in numbers.tolist()]
        batch = Collate(self.pad_id)(
            [structured(row, global_id=self.global_id, global_tokens=segments) for row in rows]
        )
        labels = torch.full_like(batch["input_ids"], -100)
        labels[:, :segments] = self.labels[numbers]
        return {**batch, "labels": labels}
