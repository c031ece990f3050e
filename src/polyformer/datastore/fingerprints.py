"""What tells one model from another: a digest of what it computes with, not of files."""

import dataclasses
import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

WHOLE = 1 << 30
"""Bytes of weights up to which all are read; of larger models, runs spread evenly over each tensor."""

RUNS, RUN = 64, 1 << 14


def model_fingerprint(model: nn.Module, config: object) -> str:
    """SHA-256 of the configuration and of every tensor by its name.

    The same model has the same one in whatever files it lies. Of a model larger than `WHOLE` bytes samples of
    its tensors are read: another training changes all of them.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    tensors = dict(sorted(model.state_dict().items()))
    whole = sum(tensor.nbytes for tensor in tensors.values() if isinstance(tensor, Tensor)) <= WHOLE
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            update(digest, tensor.detach(), whole)
    return digest.hexdigest()


def changed_settings(config: Any) -> Any:
    """A configuration as plain data, without what has its default value.

    An option that a later version adds, and that nobody has set, leaves the fingerprint as it was.
    """
    if not dataclasses.is_dataclass(config):
        return config
    values = {
        field.name: (getattr(config, field.name), default(field)) for field in dataclasses.fields(config)
    }
    kept = {name: changed_settings(value) for name, (value, usual) in values.items() if value != usual}
    return {"kind": getattr(config, "kind", ""), **kept}


def default(field: "dataclasses.Field[Any]") -> Any:
    """The value that a field has where none is said; `MISSING` for one that must be."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def update(digest: "hashlib._Hash", tensor: Tensor, whole: bool) -> None:
    """Take a tensor's bytes into `digest`: all of them, or `RUNS` runs of `RUN` bytes."""
    flat = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor
    if whole or flat.numel() <= RUNS * RUN:
        digest.update(flat.cpu().numpy().tobytes() if tensor.numel() else b"")
        return
    step = (flat.numel() - RUN) // (RUNS - 1)
    for start in range(0, RUNS * step, step):
        digest.update(flat[start : start + RUN].cpu().numpy().tobytes())
