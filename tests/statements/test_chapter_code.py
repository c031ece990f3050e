"""The code of the chapter on anatomy (docs/seeds.md), with its errors corrected, and what it prints."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Causal
from polyformer.core.sequence.context import Context
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model, model_config

IDS = torch.tensor([[2051, 10029, 2066, 2019, 8612]])  # time flies like an arrow
VOCAB, WIDTH, HEADS, INNER = 30522, 768, 12, 3072


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return torch.bmm(F.softmax(scores, dim=-1), v)


class ChapterHead(nn.Module):
    def __init__(self, width: int, head_width: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, head_width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class ChapterLayer(nn.Module):
    """Pre-norm, as the chapter chooses; attention and feed-forward in a single class."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-12) for _ in range(2))
        self.heads = nn.ModuleList(ChapterHead(width, width // heads) for _ in range(heads))
        self.output = nn.Linear(width, width)
        self.feedforward = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norms[0](x)
        x = x + self.output(torch.cat([head(hidden) for head in self.heads], dim=-1))
        return x + self.feedforward(self.norms[1](x))


class ChapterEncoder(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, inner: int, layers: int, positions: int = 512):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(ChapterLayer(width, heads, inner) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids) + self.positions(torch.arange(ids.size(1))))
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_sentence_has_the_ids_of_the_chapter(shared_data: Callable[[str], Path]):
    tokenizer = load_tokenizer(shared_data("tokenizers") / "bert-base-uncased-vocab.txt")
    assert tokenizer.encode("time flies like an arrow") == IDS[0].tolist()


@torch.no_grad()
def test_shapes_are_those_of_the_chapter():
    torch.manual_seed(0)
    encoder = ChapterEncoder(VOCAB, WIDTH, HEADS, INNER, layers=1)
    layer = encoder.layers[0]
    assert isinstance(layer, ChapterLayer)
    x = encoder.tokens(IDS)
    assert tuple(encoder.tokens.weight.shape) == (30522, 768)
    assert x.shape == (1, 5, 768)
    assert torch.bmm(x, x.transpose(1, 2)).shape == (1, 5, 5)
    assert scaled_dot_product_attention(x, x, x).shape == (1, 5, 768)
    assert layer.heads[0](x).shape == (1, 5, 768 // 12) == (1, 5, 64)
    assert torch.cat([head(x) for head in layer.heads], -1).shape == (1, 5, 64 * 12)
    assert layer.feedforward(x).shape == layer(x).shape == encoder(IDS).shape == (1, 5, 768)
    assert nn.Linear(768, 3)(encoder(IDS)[:, 0, :]).shape == (1, 3)
    config = model_config("bert-base")
    assert (config.vocab_size, config.hidden_size, INNER) == (VOCAB, WIDTH, 4 * WIDTH)


def test_attention_has_the_weights_of_the_library():
    """Two products and a softmax, with queries, keys and values that are the inputs themselves."""
    torch.manual_seed(0)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    heads = x.unsqueeze(1)
    expected = attend(heads, heads, heads)[:, 0]
    torch.testing.assert_close(scaled_dot_product_attention(x, x, x), expected, rtol=1e-12, atol=1e-12)


def test_masked_attention_is_causal_attention():
    torch.manual_seed(0)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    mask = torch.tril(torch.ones(5, 5)).unsqueeze(0)
    assert mask[0].tolist() == [[float(j <= i) for j in range(5)] for i in range(5)]
    expected = scaled_dot_product_attention(x, x, x, mask)
    heads = x.unsqueeze(1)
    actual = attend(heads, heads, heads, pattern=Causal(), context=Context(5, 5, causal=True))[:, 0]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    scores = (x @ x.mT / 4)[0]
    added = scores + torch.full((5, 5), -math.inf, dtype=torch.float64).triu(1)
    assert torch.equal(added.softmax(-1), scores.masked_fill(mask[0] == 0, -math.inf).softmax(-1))
    assert (added.softmax(-1).triu(1) == 0).all()


def test_the_diagonal_is_near_the_root_of_the_width():
    """An untrained table: q.q is about 768, not 1; over sqrt(768) the 26.8 to 29.1 of the chapter."""
    torch.manual_seed(0)
    x = nn.Embedding(VOCAB, WIDTH)(IDS)[0].detach()
    assert ((x * x).sum(-1) - 768).abs().max() < 200
    scores = x @ x.T / math.sqrt(768)
    assert (scores.diagonal() - math.sqrt(768)).abs().max() < 5
    assert (scores - scores.diagonal().diag()).abs().max() < 5
    assert (scores.softmax(-1).diagonal() > 0.999).all(), "a token gives itself nearly all weight"


def test_two_classes_do_not_run():
    class WithoutSuper(nn.Module):
        def __init__(self):
            self.q = nn.Linear(4, 4)

    with pytest.raises(AttributeError, match="cannot assign module before"):
        WithoutSuper()
    assert not hasattr(model_config("bert-base"), "hidden_state")


def test_the_default_dropout_is_a_half():
    assert nn.Dropout().p == 0.5


def test_two_thirds_of_a_layer_are_feedforward():
    layer = ChapterLayer(WIDTH, HEADS, INNER)
    count = {name: sum(p.numel() for p in part.parameters()) for name, part in layer.named_children()}
    assert count["feedforward"] / sum(count.values()) == pytest.approx(2 / 3, abs=0.001)


def translated(model: Transformer, heads: int) -> dict[str, Tensor]:
    """The weights of the library's encoder under the names of the chapter's."""
    weights, state = {}, model.state_dict()
    for name, tensor in state.items():
        name = name.removeprefix("encoder.")
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] == "attention" and parts[3] in ("query", "key", "value"):
            for head, rows in enumerate(tensor.chunk(heads)):
                weights[f"layers.{parts[1]}.heads.{head}.{parts[3][0]}.{parts[4]}"] = rows
        elif parts[0] == "layers":
            renamed = name.replace("attention.output", "output").replace("block.norms", "norms")
            renamed = renamed.replace("feedforward.up", "feedforward.0").replace(
                "feedforward.down", "feedforward.2"
            )
            weights[renamed] = tensor
    return weights


@torch.no_grad()
def test_the_corrected_encoder_is_the_library_s():
    """Up to the norm behind the last layer, which the chapter does not have."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    model = create_model("bert-base", block="pre", intermediate_size=48, initializer_range=0.3, **sizes)
    model.double().eval()
    ours = ChapterEncoder(31, 12, 3, 48, layers=2, positions=512).double().eval()
    ours.load_state_dict(translated(model, 3), strict=False)
    stack = model.encoder
    assert stack is not None
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    hidden = model(ids, output_hidden_states=True).hidden_states
    x = hidden[0]
    for layer, expected in zip(ours.layers, [*hidden[1:-1]]):
        x = layer(x)
        torch.testing.assert_close(x, expected, rtol=1e-10, atol=1e-10)
    x = ours.layers[-1](hidden[-2])
    torch.testing.assert_close(stack.final_norm(x), hidden[-1], rtol=1e-10, atol=1e-10)
