"""Plain models pay only for what they use: no function of a feature's files runs in their calls.

A second call for each feature shows that its files do run where it is configured, so that the first finding
is not empty.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer
from polyformer import attend, create_model

PACKAGE = Path(polyformer.__file__).parent
SIZES = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
IDS = torch.arange(5, 29).view(2, 12)
SPARSE = "Window(2, 0) | Global(1)"


def files_of(call: Callable[[], object]) -> set[str]:
    """Return the files of the package in which a function runs."""
    seen: set[str] = set()
    root = f"{PACKAGE}/"

    def note(frame: Any, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root) and frame.f_code.co_name != "<module>":
            seen.add(name.removeprefix(root))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def model(preset: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return create_model(preset, **{**SIZES, **options})


def trained(preset: str = "decoder-tiny", **options: Any) -> Callable[[], object]:
    """Return a forward and a backward pass in training."""
    built = model(preset, **options).train()
    return lambda: built(IDS, labels=IDS).loss.backward()


def generated(cache: str | None = None, count: int = 12, **options: Any) -> Callable[[], object]:
    built = model("decoder-tiny", **options).eval()
    return lambda: built.generate(IDS, max_new_tokens=count, cache=cache)


def read(
    mask: torch.Tensor | None = None, preset: str = "encoder-tiny", **options: Any
) -> Callable[[], object]:
    built = model(preset, **options).eval()
    return torch.no_grad()(lambda: built(IDS, attention_mask=mask))


def attention(length: int = 12, **options: Any) -> Callable[[], object]:
    q = torch.randn(1, 2, length, 8)
    return lambda: attend(q, q, q, **options)


PLAIN: dict[str, Callable[[], Callable[[], object]]] = {
    "attend": lambda: attention(pattern="Causal()"),
    "encoder": read,
    "encoder in training": lambda: trained("encoder-tiny", head="masked"),
    "decoder in training": trained,
    "decoder with rotated positions": lambda: trained(position="rope"),
    "encoder-decoder in training": lambda: trained("transformer-tiny"),
    "generation": generated,
}

PADDED = torch.ones(2, 12).index_fill(1, torch.arange(3, 12), 0)

FEATURES: dict[str, tuple[str, Callable[[], Callable[[], object]]]] = {
    "memories": ("nn/memory/", lambda: generated(memory="recurrent", position="transformer_xl")),
    "depth": ("nn/depth/", lambda: trained(depth="act")),
    "features of layers": ("nn/stack/feature_layer.py", lambda: trained(value_residual=True)),
    "features of stacks": ("nn/stack/feature_stack.py", lambda: trained(layerdrop=0.5)),
    "runners of layers": ("nn/stack/runners.py", lambda: trained(depth="act")),
    "packed weights": (
        "models/generation/packed_weights.py",
        lambda: generated(count=20, hidden_size=80, intermediate_size=1000),
    ),
    "features of attention": ("nn/stack/feature_attention.py", lambda: trained(output_gate=True)),
    "global projections": (
        "nn/stack/global_projections.py",
        lambda: read(attention=SPARSE, global_projections=True),
    ),
    "latents": ("nn/stack/latent.py", lambda: trained(latent={})),
    "policies of caches": ("nn/cache/", lambda: generated("h2o(budget=4)")),
    "convolutions": ("nn/stack/convolution.py", lambda: read(block="post", convolution={})),
    "reversible layers": ("nn/stack/reversible.py", lambda: trained(block="reversible")),
    "hyper-connections": ("nn/block/hyper_connections.py", lambda: trained(block="hyper_connections")),
    "adaptive embeddings": (
        "nn/stack/adaptive_embedding.py",
        lambda: read(embedding={"adaptive": {"cutoffs": (10,)}}),
    ),
    "parts that draft": ("nn/heads/drafting.py", lambda: trained(drafting="medusa")),
    "drafts by the model itself": (
        "models/generation/self_drafts.py",
        lambda: lambda: model("decoder-tiny", drafting="multi_token").eval().generate(IDS, draft="self"),
    ),
    "experts": ("nn/feedforward/experts.py", lambda: trained(feedforward="experts")),
    "padding": ("models/architectures/unpadding.py", lambda: read(PADDED)),
    "terms by distance": ("attention/functional/relative.py", lambda: trained(position="alibi")),
    "tiles": (
        "attention/functional/backends/tiled/",
        lambda: attention(96, pattern="Window(2)", backend="tiled"),
    ),
    "mods": ("attention/patterns/mods.py", lambda: attention(score_mod=lambda score, b, h, i, j: score)),
    "recorded weights": (
        "attention/functional/backends/definition.py",
        lambda: lambda: model("encoder-tiny")(IDS, output_attentions=True),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_call_runs_no_feature(name: str):
    ran = files_of(PLAIN[name]())
    for feature, (place, _) in FEATURES.items():
        assert not [file for file in ran if file.startswith(place)], feature


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_runs_where_it_is_configured(feature: str):
    place, build = FEATURES[feature]
    assert any(file.startswith(place) for file in files_of(build()))
