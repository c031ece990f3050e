"""Small random models of the architectures that are tested, and inputs for them."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import polyformer.models.transformers_attention  # noqa: F401  (it registers)
from polyformer.models.attached.architectures import ARCHITECTURES, Architecture
from tolerances import Double, assert_rounded

LENGTH, OURS = 12, "polyformer"
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
KINDS = sorted({architecture.kind for architecture in ARCHITECTURES})
WINDOWED = [architecture.name for architecture in ARCHITECTURES if architecture.window is not None]
transformers.logging.set_verbosity_error()


def build(architecture: Architecture, seed: int = 0, **options: Any) -> Any:
    """The model, its matrices random enough for attention to matter."""
    torch.manual_seed(seed)
    kind: Any = getattr(transformers, architecture.model)
    model = kind(kind.config_class(**{**architecture.config, **options}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.eval()


@contextlib.contextmanager
def of(name: str) -> Iterator[None]:
    """Let an error say the model's name."""
    try:
        yield
    except Exception as error:
        error.add_note(f"of {name}")
        raise


def reference(architecture: Architecture) -> str:
    """The implementation of transformers to compare with."""
    capped = "attn_logit_softcapping" in architecture.config  # torch's function has no such thing
    return "sdpa" if getattr(transformers, architecture.model)._supports_sdpa and not capped else "eager"


@functools.cache
def token_ids(length: int = LENGTH) -> Tensor:
    """[2, length], no special tokens."""
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(1))


def padding(left: int = 4, right: int = 3) -> Tensor:
    """A mask [2, LENGTH] with padding before the first row and after the second."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :left] = 0
    mask[1, LENGTH - right :] = 0
    return mask


def inputs(architecture: Architecture) -> dict[str, Tensor]:
    """What the model is called with; texts are padded on both sides."""
    generator = torch.Generator().manual_seed(2)
    text = {"input_ids": token_ids(), "attention_mask": padding()}
    image = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    target = {"decoder_input_ids": token_ids()[:, :7].flip(1)}
    match architecture.kind:
        case "decoder" | "encoder":
            return text
        case "encoder-decoder":
            return text | target
        case "image":
            return image
        case "image and text":
            return text | image
        case "audio":
            return {"input_values": torch.randn(2, 200, generator=generator)}
        case "speech to text":
            return {"input_features": torch.randn(2, 8, 16, generator=generator)} | target


def answer(model: Any, **batch: Any) -> Tensor:
    """The logits or last states, 0 at padding."""
    output = model(**batch)
    out = output.logits_per_text if "logits_per_text" in output else output[0]
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2 and out.dim() == 3 and out.shape[1] == mask.shape[1]:
        out = out * mask.unsqueeze(-1)
    return out


def with_gradients(model: Any, implementation: str, **batch: Any) -> dict[str, Tensor]:
    """The answer, and the gradients of its mean square by the parameters' names."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = answer(model, **batch)
    out.square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"answer": out.detach(), **grads}


def double(model: Any) -> Any:
    """Return a copy of the model in float64, its experts by products that torch has in float64."""
    twin = copy.deepcopy(model).double()
    twin.set_experts_implementation("eager")
    return twin


@contextlib.contextmanager
def no_float32(model: Any) -> Iterator[None]:
    """Let the model's code and `generate` compute in float64 what they compute in float32 otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (type(model).__module__, "transformers.generation.utils"):
            patch.setattr(f"{module}.torch", Double())
        yield


def doubles(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs, those that are numbers in float64."""
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def assert_all_rounded(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Assert that `ours` differs from `exact`, which is `theirs` in float64, by rounding only."""
    assert ours.keys() == theirs.keys() == exact.keys()
    for name, tensor in ours.items():
        assert_rounded(tensor, theirs[name], exact[name])


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """All tensors within 1e-5, of their largest entry where that is above 1."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        limit = 1e-5 * max(1.0, float(tensor.abs().max()))
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=limit, msg=name)
