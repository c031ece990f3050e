"""Encoders of several reviews in a row, each with a global token that names the label of its review."""

from pathlib import Path

import torch
from torch import Tensor

from polyformer.data import Collate, Tokenizer
from polyformer.data.rows.structured import structured
from polyformer.data.tokenizers.loading import load_tokenizer
from polyformer.training import Batch
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.generated import HELD_OUT, Options, tagger, trained
from polyformer_lab.measures.labelled import TEST, TRAIN, Labelled, read_texts


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
