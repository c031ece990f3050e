"""A decoder that classifies from its last token."""

from typing import Any

import torch

from polyformer.core.ops.layers import pool
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer_lab.layers import DecoderClassification, DecoderClassificationConfig


def test_logits_are_a_linear_layer_of_the_last_token_without_padding():
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="bytes"), [])
    config = DecoderClassificationConfig(labels=("0", "1", "2"), max_length=16)
    task = DecoderClassification(config, tokenizer)
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("decoder-tiny"))).eval()
    output: Any = model.head.output
    rows = [{"text": "a long text"}, {"text": "short"}]
    [(numbers, logits)] = task.logits(model, rows)
    batch = task.collate([task.encode_rows(rows)[number] for number in numbers])
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
        last = pool(hidden, batch["attention_mask"].bool(), "last")
        expected = output(last)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits, expected)
