"""A decoder in plain PyTorch with GPT-2's equations, as a user writes it: the measure of our overhead."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.models.config import ModelConfig

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values [B, H, T, D] of each layer."""


class PlainLayer(nn.Module):
    """A pre-norm layer: x [B, T, E] -> [B, T, E]."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the output, and the keys and values so far."""
        rows, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")), (k, v)


class PlainDecoder(nn.Module):
    """A language model with learned positions and tied weights."""

    def __init__(self, vocabulary: int, positions: int, layers: int, width: int, heads: int, inner: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList(PlainLayer(width, heads, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return hidden states [B, T, E] and the cache, after the tokens in `past`."""
        start = past[0][0].shape[2] if past else 0
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1], device=ids.device))
        cache: Cache = []
        for index, layer in enumerate(self.layers):
            x, pair = layer(x, past[index] if past else None)
            cache.append(pair)
        return self.norm(x), cache

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits [B, T, V] of the next tokens."""
        return F.linear(self(ids)[0], self.tokens.weight)

    def loss(self, ids: Tensor) -> Tensor:
        """Return the mean cross-entropy of each next token."""
        return F.cross_entropy(self.logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        """Return the `count` most probable next tokens [B, count], chosen one at a time."""
        hidden, cache = self(ids)
        chosen = []
        for _ in range(count):
            chosen.append(F.linear(hidden[:, -1], self.tokens.weight).argmax(-1, keepdim=True))
            if len(chosen) < count:
                hidden, cache = self(chosen[-1], cache)
        return torch.cat(chosen, 1)


def plain_decoder(config: ModelConfig, weights: dict[str, Tensor]) -> PlainDecoder:
    """Return the plain model with the weights of ours, a decoder of GPT-2's equations."""
    stack = config.decoder
    assert stack is not None
    attention, inner = stack.attention, weights["decoder.layers.0.feedforward.up.weight"].shape[0]
    sizes = config.vocab_size, config.max_position_embeddings, stack.num_hidden_layers
    plain = PlainDecoder(*sizes, config.hidden_size, attention.num_attention_heads, inner)
    names = {
        "tokens": "tokens",
        "positions": "decoder.position.tables.0",
        "norm": "decoder.final_norm",
    }
    for index in range(stack.num_hidden_layers):
        own, other = f"layers.{index}", f"decoder.layers.{index}"
        names |= {f"{own}.norm_1": f"{other}.block.norms.0", f"{own}.norm_2": f"{other}.block.norms.1"}
        names |= {f"{own}.out": f"{other}.attention.output"}
        names |= {f"{own}.{name}": f"{other}.feedforward.{name}" for name in ("up", "down")}
    own_weights = {}
    for name in plain.state_dict():
        module, _, kind = name.rpartition(".")
        if module.endswith("qkv"):
            layer = f"decoder.{module.rpartition('.')[0]}.attention"
            parts = [weights[f"{layer}.{part}.{kind}"] for part in ("query", "key", "value")]
            own_weights[name] = torch.cat(parts)
        else:
            own_weights[name] = weights[f"{names[module]}.{kind}"]
    plain.load_state_dict(own_weights)
    return plain
