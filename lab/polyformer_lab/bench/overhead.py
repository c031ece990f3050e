"""Tiny models, where Python takes the time: ours, a decoder in plain PyTorch and transformers, equal weights.

Products are small here, so that the ratios show what composition costs: a forward pass, generated tokens, a
training step with AdamW, and a call of attention. The numbers of calls do not depend on the machine.

The decoder in plain PyTorch has GPT-2's equations, as a user writes it: the measure of our overhead.
"""

import cProfile
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyformer
from polyformer.models.config import ModelConfig
from polyformer.models.generation import GenerationConfig
from polyformer.models.generation.config import SpecialIds
from polyformer_lab.bench.passes import TRANSFORMERS, gpt2_pair
from polyformer_lab.bench.rows import OURS, Bench, Case, Make, Row
from polyformer_lab.bench.running import runner

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


PLAIN = "plain PyTorch"

WARM_UP = 3
"""Runs before calls are counted: the first ones plan."""

ASKED = {(OURS, PLAIN): 1 / 1.3, (OURS, TRANSFORMERS): 1.2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverheadBench(Bench):
    """A decoder of GPT-2's shape, a batch of prompts, and greedy generation."""

    layers: int = 4
    hidden_size: int = 32
    heads: int = 4
    vocab_size: int = 1000
    batch: int = 2
    length: int = 16
    new_tokens: int = 12
    repeats: int = 25

    def rows(self) -> Iterator[Row]:
        """Yield the passes of a model, and attention."""
        for what, make in {"forward": forward, "generation": generation, "step": step}.items():
            name = f"{self.layers} layers of {self.hidden_size}, {what}"
            yield Row(
                f"tiny-{what}", name, functools.partial(self._cases, make), asked=ASKED, repeats=self.repeats
            )
        for stated in ("text", "object", "function"):
            asked = {(OURS, "torch"): 1 / 2.5}
            yield Row(
                f"attend-{stated}",
                f"attention of {self.length} tokens, pattern as {stated}",
                functools.partial(self._attention, stated),
                asked=asked,
                repeats=self.repeats,
            )

    def _cases(self, make: Callable[["OverheadBench", Any, Tensor], Callable[[], object]]) -> Iterator[Case]:
        pair = gpt2_pair(self, max(256, self.length + self.new_tokens))
        weights = {name: tensor.detach().clone() for name, tensor in pair.ours.state_dict().items()}
        ids = torch.randint(5, self.vocab_size, (self.batch, self.length))
        models = {PLAIN: lambda: plain_decoder(pair.ours.config, weights), **pair.makers}
        yield counted({name: self._maker(make, model, ids) for name, model in models.items()})

    def _maker(
        self, make: Callable[..., Callable[[], object]], model: Callable[[], Any], ids: Tensor
    ) -> Make:
        return lambda: make(self, model(), ids)

    def _attention(self, stated: str) -> Iterator[Case]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, self.heads, self.length, 16, generator=generator) for _ in range(3))
        patterns = {"text": "Causal()", "object": polyformer.Causal(), "function": causal}
        ours = functools.partial(polyformer.attend, q, k, v, pattern=patterns[stated])
        torchs = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        yield counted({OURS: lambda: torch.no_grad()(ours), "torch": lambda: torch.no_grad()(torchs)})


def counted(contenders: dict[str, Make]) -> Case:
    """Return the case of these contenders, with their numbers of calls."""
    return Case(contenders, facts={name: functools.partial(calls, make) for name, make in contenders.items()})


def calls(make: Make) -> dict[str, float]:
    """Return the number of calls of Python functions and of compiled ones that a repeated run makes.

    The number is the same on every machine, however busy.
    """
    call = make()
    for _ in range(WARM_UP):
        call()
    profile = cProfile.Profile()
    profile.runcall(call)
    return {"calls": float(sum(entry.callcount for entry in profile.getstats()))}


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return whether a key is not after its query, as FlexAttention's `mask_mod`."""
    return kv_idx <= q_idx


def forward(config: OverheadBench, model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    """Return a forward pass to the logits [B, T, V]."""
    model.eval()
    if isinstance(model, PlainDecoder):
        return torch.no_grad()(lambda: model.logits(ids))
    return torch.no_grad()(lambda: model(ids).logits)


def generation(config: OverheadBench, model: Any, ids: Tensor) -> Callable[[], Tensor]:
    """Return greedy generation without an end token: the new tokens [B, count]."""
    model.eval()
    count = config.new_tokens
    if isinstance(model, PlainDecoder):
        return lambda: model.generate(ids, count)
    if isinstance(model, polyformer.Transformer):
        settings = GenerationConfig(max_new_tokens=count, special=SpecialIds(eos=()))
        return lambda: model.generate(ids, config=settings).sequences[:, ids.shape[1] :]
    lengths = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    return lambda: model.generate(ids, attention_mask=mask, **lengths)[:, ids.shape[1] :]


def step(config: OverheadBench, model: Any, ids: Tensor) -> Callable[[], None]:
    """Return a training step: the loss, its gradients and AdamW."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)

    def call() -> None:
        optimizer.zero_grad()
        loss = model.loss(ids) if isinstance(model, PlainDecoder) else model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()

    return call


run = runner(OverheadBench)
