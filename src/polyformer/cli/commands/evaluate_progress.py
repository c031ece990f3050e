"""`evaluate --progress`: save intermediate results, so that an interrupted evaluation can be resumed."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from polyformer.training.tasks.workers import Workers


def resumable(folder: str | None, shared: "Workers", model: "nn.Module", settings: object) -> "Workers":
    """Return the processes with a store in `folder` for the results of `model` with these `settings`."""
    if folder is None:
        return shared
    from polyformer.applications.retrieval.fingerprints import model_fingerprint
    from polyformer.training.environment import versions
    from polyformer.training.tasks.cached_results import CachedResults

    subject = model_fingerprint(model, [settings, versions()])
    return dataclasses.replace(shared, results=CachedResults(Path(folder), subject, shared.rank))


def report(shared: "Workers") -> None:
    """Print on standard error how many results of this process were reused."""
    if shared.results is not None and shared.results.reused:
        prefix = f"process {shared.rank + 1} of {shared.world}: " if shared.world > 1 else ""
        every = shared.results.reused + shared.results.computed
        print(
            f"polyformer: {prefix}reused the results of {shared.results.reused:,} of {every:,} "
            "batches and texts "
            f"in {shared.results.file.parent}",
            file=sys.stderr,
        )
