"""Disentangled positions against transformers' DeBERTa: encoders of both versions with the same weights."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.core.context import Context
from polyformer.core.norms import LayerNormConfig
from polyformer.feedforward import DenseConfig
from polyformer.heads import MaskedConfig
from polyformer.model import ModelConfig, Transformer
from polyformer.position import DebertaConfig, Shape
from polyformer.position.deberta import log_buckets
from polyformer.stack import AttentionConfig, EmbeddingConfig, StackConfig

transformers = pytest.importorskip("transformers")
v2 = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")

WIDTH, LENGTH = 12, 13
SIZES = {"vocab_size": 23, "hidden_size": WIDTH, "num_hidden_layers": 2,
         "intermediate_size": 20, "max_position_embeddings": 19}  # fmt: skip
LAYER = {"attention.self.query_proj": "attention.query", "attention.self.key_proj": "attention.key",
         "attention.self.value_proj": "attention.value", "attention.output.dense": "attention.output",
         "attention.output.LayerNorm": "block.norms.0", "intermediate.dense": "feedforward.up",
         "output.dense": "feedforward.down", "output.LayerNorm": "block.norms.1"}  # fmt: skip
FIRST = {"attention.self.pos_proj": "keys", "attention.self.pos_q_proj": "queries"}
LATER = {"attention.self.pos_key_proj": "keys", "attention.self.pos_query_proj": "queries"}


def heads(terms: tuple[str, ...]) -> int:
    """So many that D (1 + terms) is 9 or 4: theirs takes its root in float32."""
    return {1: 6, 2: 4}[len(terms)]


def ours_from_theirs(theirs: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Weights, or their gradients, under our names; what acts on no score (a bias of kr) has none."""
    names = {"embeddings.word_embeddings": "tokens", "embeddings.LayerNorm": "encoder_embedding.norm",
             "encoder.rel_embeddings": "encoder.position.table",
             "encoder.LayerNorm": "encoder.position.norm"}  # fmt: skip
    found = {}
    for i in range(SIZES["num_hidden_layers"]):
        names |= {f"encoder.layer.{i}.{old}": f"encoder.layers.{i}.{new}" for old, new in LAYER.items()}
        own = FIRST | LATER
        names |= {f"encoder.layer.{i}.{old}": f"encoder.position.{new}.{i}" for old, new in own.items()}
        found |= unpacked(theirs, f"encoder.layer.{i}.attention.self", f"encoder.layers.{i}.attention", size)
    for old, new in names.items():
        for kind in ("weight", "bias"):
            if f"{old}.{kind}" in theirs and not (".keys." in new and kind == "bias"):
                found[f"{new}.{kind}"] = theirs[f"{old}.{kind}"]
    return found


def unpacked(theirs: dict[str, Tensor], old: str, new: str, size: int) -> dict[str, Tensor]:
    """The first version's projections, which lie head by head in one matrix; its keys have no bias."""
    if f"{old}.in_proj.weight" not in theirs:
        return {}
    q, k, v = theirs[f"{old}.in_proj.weight"].view(-1, 3, size, WIDTH).unbind(1)
    found = {f"{new}.{name}.weight": one.flatten(0, 1) for name, one in
             (("query", q), ("key", k), ("value", v))}  # fmt: skip
    return {**found, f"{new}.query.bias": theirs[f"{old}.q_bias"],
            f"{new}.value.bias": theirs[f"{old}.v_bias"], f"{new}.key.bias": torch.zeros(WIDTH)}  # fmt: skip


def ours(position: DebertaConfig) -> Transformer:
    attention = AttentionConfig(num_attention_heads=heads(position.terms))
    stack = StackConfig(num_hidden_layers=2, attention=attention, position=position,
                        feedforward=DenseConfig(intermediate_size=20, activation="gelu"),
                        norm=LayerNormConfig(eps=1e-7))  # fmt: skip
    config = ModelConfig(
        vocab_size=23,
        hidden_size=WIDTH,
        max_position_embeddings=19,
        encoder=stack,
        embedding=EmbeddingConfig(normed=True),
        head=MaskedConfig(),
    )
    return Transformer(config).double()


def theirs(version: str, position: DebertaConfig) -> torch.nn.Module:
    """Their encoder, in float64, with weights that are all away from zero and one."""
    options: dict[str, Any] = {
        "num_attention_heads": heads(position.terms),
        "relative_attention": True, "position_biased_input": False, "type_vocab_size": 0,
        "pos_att_type": list(position.terms), "max_relative_positions": position.max_relative_positions or -1,
        "pad_token_id": None, "layer_norm_eps": 1e-7,
    }  # fmt: skip
    if version == "v2":
        options |= {"position_buckets": position.buckets or -1, "share_att_key": position.share_projections,
                    "norm_rel_ebd": "layer_norm" if position.norm_embeddings else "none"}  # fmt: skip
    torch.manual_seed(0)
    name = {"v1": "Deberta", "v2": "DebertaV2"}[version]
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    model = getattr(transformers, f"{name}Model")(config)
    for module in list(model.modules()):  # the first version normalises in float32 whatever it is given
        for child, norm in module.named_children():
            if type(norm).__name__ == "DebertaLayerNorm":
                setattr(module, child, torch.nn.LayerNorm(WIDTH, eps=1e-7))
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.4)
    return model


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


CASES = {
    "v1": ("v1", DebertaConfig()),
    "v1-clipped": ("v1", DebertaConfig(max_relative_positions=4)),
    "v1-c2p": ("v1", DebertaConfig(max_relative_positions=5, terms=("c2p",))),
    "v1-p2c": ("v1", DebertaConfig(max_relative_positions=5, terms=("p2c",))),
    "v2": ("v2", DebertaConfig(buckets=4, share_projections=True, norm_embeddings=True)),
    "v2-near": ("v2", DebertaConfig(max_relative_positions=9, buckets=4, share_projections=True)),
    "v2-own": ("v2", DebertaConfig(buckets=6, norm_embeddings=True)),
    "v2-clipped": ("v2", DebertaConfig(max_relative_positions=6, share_projections=True)),
    "v2-c2p": ("v2", DebertaConfig(buckets=4, share_projections=True, terms=("c2p",))),
    "v2-p2c": ("v2", DebertaConfig(buckets=4, share_projections=True, terms=("p2c",))),
}


@pytest.mark.parametrize("name", CASES)
def test_an_encoder_is_theirs(name: str):
    """Hidden states of all layers, attention weights and gradients, in rows of different lengths."""
    version, position = CASES[name]
    reference, model = theirs(version, position), ours(position).eval()
    size = WIDTH // heads(position.terms)
    weights = ours_from_theirs(dict(reference.state_dict()), size)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(one.startswith("head.") for one in missing)
    torch.manual_seed(1)
    ids = torch.randint(23, (3, LENGTH))
    mask = (torch.arange(LENGTH) < torch.tensor([[13], [8], [2]])).long()
    real, wanted = mask.bool(), {"output_hidden_states": True, "output_attentions": True}
    mine, other = model(ids, mask, **wanted), reference(ids, mask, **wanted)
    for a, b in zip(mine.hidden_states, other.hidden_states, strict=True):
        same(a[real], b[real])
    for a, b in zip(mine.attentions, other.attentions, strict=True):
        same(a.transpose(1, 2)[real], b.transpose(1, 2)[real])
    plain = model(ids, mask).last_hidden_state  # not recorded, so by another backend
    same(plain[real], other.last_hidden_state[real])
    direction = torch.randn(int(real.sum()), WIDTH).double()
    (plain[real] * direction).sum().backward()
    (other.last_hidden_state[real] * direction).sum().backward()
    slopes = {key: one.grad for key, one in reference.named_parameters() if one.grad is not None}
    expected = ours_from_theirs(slopes, size)
    for key, parameter in model.named_parameters():
        if key.startswith("head.") or (version == "v1" and key.endswith("attention.key.bias")):
            continue
        assert parameter.grad is not None, key
        same(parameter.grad, expected[key])


@pytest.mark.parametrize(("buckets", "reach"), [(256, 512), (4, 19), (4, 9), (6, 100), (32, 128), (8, 64)])
def test_log_buckets_are_theirs(buckets: int, reach: int):
    distance = torch.arange(-3 * reach, 3 * reach + 1)
    expected = v2.make_log_bucket_position(distance, buckets, reach)
    torch.testing.assert_close(log_buckets(distance, buckets, reach), expected.long(), rtol=0, atol=0)
    assert int(log_buckets(torch.tensor(reach - 1), buckets, reach)) == buckets - 1


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_tables_are_the_equation(causal: bool, mirrored: bool):
    """Equation 4 written pair by pair, with delta as section 3.1 defines it."""
    config = DebertaConfig(max_relative_positions=3, mirrored=mirrored)
    position = config.build(Shape(hidden_size=8, num_layers=2, num_heads=2, head_size=4)).double()
    torch.manual_seed(2)
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    q, k, k_first = (torch.randn(1, 2, 7, 4).double() for _ in range(3))
    context = Context(7, 7, causal=causal)
    site: Any = dataclasses.make_dataclass("OfLayer", ["layer"])(1)
    turned, untouched = position.rotate(q, k_first, context, site)
    assert untouched is k_first
    relative = position.relative(turned, k, context, site)
    i, j = torch.arange(7).view(-1, 1), torch.arange(7)
    zero = torch.zeros(1, 2, 7, 7).double()
    found = relative.score_mod(turned, k, 0.5, context)(
        zero, torch.zeros(1, 1, 1, 1).long(), torch.arange(2).view(1, 2, 1, 1), i, j
    )

    def delta(a: int, b: int) -> int:
        return 0 if a - b <= -3 else 5 if a - b >= 3 else a - b + 3

    rows = position.table.weight
    kr = (rows @ position.keys[1].weight.T).view(6, 2, 4)
    qr = (rows @ position.queries[1].weight.T + position.queries[1].bias).view(6, 2, 4)
    for a in range(7):
        for b in range(a + 1 if causal else 7):
            at = delta(b, a) if mirrored else delta(a, b)
            for head in range(2):
                term = q[0, head, a] @ kr[delta(a, b), head] + k[0, head, b] @ qr[at, head]
                same(found[0, head, a, b], term / (3 * 4) ** 0.5)
