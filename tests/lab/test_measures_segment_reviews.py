"""Reviews side by side in rows of segments."""

import torch

from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer_lab.measures.strings import Reviews


def test_each_global_token_has_the_label_of_its_review():
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=60), ["ab ba", "b a"])
    reviews = Reviews([("ab", "1"), ("b a b", "0"), ("ba", "1")], tokenizer)
    batch = reviews.batch(torch.tensor([[0, 1], [2, 0]]))
    assert batch["labels"][:, :2].tolist() == [[1, 0], [1, 1]]
    assert bool((batch["labels"][:, 2:] == -100).all())
    for row, numbers in enumerate([[0, 1], [2, 0]]):
        for segment, number in enumerate(numbers):
            of = (batch["segment_ids"][row] == segment) & (batch["attention_mask"][row] == 1)
            ids = batch["input_ids"][row][of].tolist()
            assert ids == [tokenizer.cls_id, *reviews.ids[number]]
