"""Perplexity in segments: every token is predicted once, in batches or not, as far as positions reach."""

import dataclasses
import math

import pytest
import torch

from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer_lab.measures.long_texts import batches, segment_perplexity


def tiny(position: str) -> Transformer:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 23}
    torch.manual_seed(0)
    config = model_config("decoder-tiny", {**sizes, "intermediate_size": 16, "position": position})
    return Transformer(dataclasses.replace(config, max_position_embeddings=8, initializer_range=0.5)).double()


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 5, 37, 50])
def test_segments_predict_every_token_once(length: int):
    """37 tokens, in segments that do not overlap but for the token they begin with."""
    model, ids = tiny("alibi").eval(), torch.randint(0, 23, (37,), generator=torch.Generator().manual_seed(1))
    nats, predicted = 0.0, 0
    for start in range(0, 36, length - 1):
        segment = ids[start : start + length]
        logits = model(input_ids=segment[None]).logits[0]
        for place in range(1, len(segment)):
            nats -= math.log(float(logits[place - 1].softmax(-1)[segment[place]]))
            predicted += 1
    assert predicted == 36
    assert segment_perplexity(model, ids, length) == pytest.approx(math.exp(nats / 36), rel=1e-9)


def test_batches_of_segments_hold_the_same_rows():
    ids = torch.randint(0, 23, (40,), generator=torch.Generator().manual_seed(1))
    single = [row for batch in batches(ids, 9, batch_tokens=1) for row in batch.tolist()]
    together = list(batches(ids, 9, batch_tokens=27))
    assert [batch.shape for batch in together] == [(3, 9), (1, 9), (1, 8)]
    assert [row for batch in together for row in batch.tolist()] == single


def test_learned_positions_end():
    model, ids = tiny("learned"), torch.arange(20)
    assert segment_perplexity(model, ids, 8) is not None
    assert segment_perplexity(model, ids, 9) is None
