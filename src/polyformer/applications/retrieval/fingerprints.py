"""Fingerprints of models: digests of their configuration and weights, independent of the files."""

import dataclasses
import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

WHOLE = 1 << 30
"""Models up to this many bytes are read completely, of larger models only evenly spaced runs of each tensor.
"""

RUNS, RUN = 64, 1 << 14


def model_fingerprint(model: nn.Module, config: object) -> str:
    """Return the SHA-256 of the configuration and of every tensor with its name.

    It does not depend on the files that store the model. Of a model larger than `WHOLE` bytes only samples of
    its tensors are read: any training changes all of them.
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
    """Return a configuration as plain data, without the fields that have their default value.

    So an option that a later version adds does not change the fingerprint unless it is set.
    """
    if not dataclasses.is_dataclass(config):
        return config
    values = {
        field.name: (getattr(config, field.name), default(field)) for field in dataclasses.fields(config)
    }
    kept = {name: changed_settings(value) for name, (value, usual) in values.items() if value != usual}
    return {"kind": getattr(config, "kind", ""), **kept}


def default(field: "dataclasses.Field[Any]") -> Any:
    """Return the default value of a field; `MISSING` if it is required."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def update(digest: "hashlib._Hash", tensor: Tensor, whole: bool) -> None:
    """Update `digest` with a tensor's bytes: all of them, or `RUNS` runs of `RUN` bytes."""
    flat = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor
    if whole or flat.numel() <= RUNS * RUN:
        digest.update(flat.cpu().numpy().tobytes() if tensor.numel() else b"")
        return
    step = (flat.numel() - RUN) // (RUNS - 1)
    for start in range(0, RUNS * step, step):
        digest.update(flat[start : start + RUN].cpu().numpy().tobytes())
