"""The numbers of Longformer's paper; test_families compares models with transformers'."""

import torch

from polyformer.models.presets import create_model


def test_windows_and_dilation_of_the_decoder():
    """Windows grow upwards; only in the upper layers two heads skip keys (section 4.1)."""
    torch.manual_seed(0)
    model = create_model(
        "longformer-decoder-small", num_attention_heads=8, hidden_size=32, vocab_size=50
    ).eval()
    length = 400
    seen = model(torch.randint(50, (1, length)), output_attentions=True).attentions
    for weights, (reach, dilation) in zip(seen, [(31, 1), (63, 1), (127, 2), (127, 3)], strict=True):
        last = weights[0, :, -1].flip(-1)  # by distance, for the last query
        distances = [(head > 0).nonzero().flatten().tolist() for head in last]
        far = list(range(0, reach * dilation + 1, dilation))
        assert distances == [far] * 2 + [list(range(reach + 1))] * 6
