"""The encoder-decoder, post- and pre-norm, is made of torch's own layers with the same weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config

WIDTH, HEADS, INNER, VOCAB, LAYERS = 12, 3, 20, 23, 2


def ours_from_theirs(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights, or their gradients, under our names; torch keeps q, k and v in one matrix."""
    actual = {}
    for name, tensor in theirs.items():
        side, rest = name.split(".", 1)
        rest = rest.replace("self_attn", "attention").replace("multihead_attn", "cross_attention")
        rest = rest.replace("out_proj", "output").replace("linear1", "feedforward.up")
        rest = rest.replace("linear2", "feedforward.down").replace("layers.", f"{side}.layers.")
        for i in (1, 2, 3):
            rest = rest.replace(f"norm{i}", f"block.norms.{i - 1}")
        if rest.startswith("norm."):
            rest = f"{side}.final_{rest}"
        if "in_proj_" not in rest:
            actual[rest] = tensor
            continue
        start, kind = rest.split("in_proj_")
        actual |= {
            f"{start}{item}.{kind}": part for item, part in zip(("query", "key", "value"), tensor.chunk(3))
        }
    return actual


def pair(block: str) -> tuple[Transformer, nn.ModuleDict]:
    torch.manual_seed(0)
    options = {"dim_feedforward": INNER, "dropout": 0.0, "batch_first": True, "norm_first": block == "pre"}
    norms = [nn.LayerNorm(WIDTH) if block == "pre" else None for _ in range(2)]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, **options), LAYERS, norms[0], enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, **options), LAYERS, norms[1])
    theirs = nn.ModuleDict({"encoder": encoder, "decoder": decoder}).double()
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "dropout": 0.0,
        "block": block,
    }
    ours = Transformer(model_config("transformer-base", sizes)).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    missing, unexpected = ours.load_state_dict(ours_from_theirs(dict(theirs.state_dict())), strict=False)
    assert (missing, unexpected) == (["tokens.weight"], [])
    return ours, theirs


def embedded(ids: Tensor, table: Tensor) -> Tensor:
    """Vectors times sqrt(E) plus sinusoids, one number at a time as the paper writes them."""
    rows = []
    for p in range(ids.shape[1]):
        angle = [p / 10000 ** (2 * (i // 2) / WIDTH) for i in range(WIDTH)]
        rows.append([math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(angle)])
    return table[ids] * math.sqrt(WIDTH) + torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("block", ["post", "pre"])
def test_outputs_and_gradients(block: str):
    """With padding on the source and on the target; loss with label smoothing, as in training."""
    ours, theirs = pair(block)
    torch.manual_seed(1)
    source, target = torch.randint(3, VOCAB, (3, 9)), torch.randint(3, VOCAB, (3, 7))
    keep = torch.arange(9) < torch.tensor([[9], [4], [1]])
    labels = target.masked_fill(torch.arange(7) >= torch.tensor([[7], [2], [5]]), -100)
    mine = ours(source, attention_mask=keep.long(), labels=labels)

    table = ours.tokens.weight.detach().clone().requires_grad_()
    shifted = torch.cat(
        [torch.ones(3, 1, dtype=torch.long), labels[:, :-1].masked_fill(labels[:, :-1] < 0, 0)], 1
    )
    memory = theirs["encoder"](embedded(source, table), src_key_padding_mask=~keep)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    hidden = theirs["decoder"](
        embedded(shifted, table), memory, tgt_mask=future, memory_key_padding_mask=~keep
    )
    logits = hidden @ table.T
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)

    torch.testing.assert_close(mine.encoder_last_hidden_state[keep], memory[keep], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mine.logits, logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mine.loss, loss, rtol=1e-10, atol=1e-10)
    mine.loss.backward()
    loss.backward()
    expected = ours_from_theirs(
        {name: item.grad for name, item in theirs.named_parameters() if item.grad is not None}
    )
    assert table.grad is not None
    expected["tokens.weight"] = table.grad
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10)
