"""`evaluate --progress`: what is measured is kept, so that an evaluation that was stopped goes on."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from polyformer.training.tasks.workers import Workers


def resumable(folder: str | None, shared: "Workers", model: "nn.Module", settings: object) -> "Workers":
    """The same processes, which keep in `folder` what they measure of `model`, with these `settings`."""
    if folder is None:
        return shared
    from polyformer.applications.retrieval.fingerprints import model_fingerprint
    from polyformer.training.environment import versions
    from polyformer.training.tasks.cached_results import CachedResults

    subject = model_fingerprint(model, [settings, versions()])
    return dataclasses.replace(shared, results=CachedResults(Path(folder), subject, shared.rank))


def report(shared: "Workers") -> None:
    """How much of this process's share had been measured before, on standard error."""
    if shared.results is not None and shared.results.reused:
        who = f"process {shared.rank + 1} of {shared.world}: " if shared.world > 1 else ""
        every = shared.results.reused + shared.results.computed
        print(
            f"polyformer: {who}{shared.results.reused:,} of {every:,} batches and texts had been measured, "
            f"in {shared.results.file.parent}",
            file=sys.stderr,
        )
