"""Audit the tested architectures of transformers: `python -m polyformer.applications.audit.architectures`.

Prints a table of all findings for docs/results/audit.md.
"""

import time
from typing import Any

import torch
from torch import nn

from polyformer.applications.audit import audit
from polyformer.models.attached.architectures import ARCHITECTURES, Architecture


def random_model(architecture: Architecture, **options: Any) -> Any:
    """Return a small model, its trained matrices random enough for attention to matter."""
    import transformers

    torch.manual_seed(0)
    kind: Any = getattr(transformers, architecture.model)
    model = kind(kind.config_class(**{**architecture.config, **options}))
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.requires_grad:
            nn.init.normal_(parameter, std=0.15)
    return model.eval()


def table() -> str:
    """Return the findings of all architectures as a Markdown table, equal ones in a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    models = [(row, row.name, {}) for row in ARCHITECTURES]
    models += [(row, f"{row.name} with windows", row.window) for row in ARCHITECTURES if row.window]
    checks, start = 0, time.process_time()
    for architecture, name, options in models:
        report = audit(random_model(architecture, **options), name=name)
        checks += len(report.of("passed")) + len(report.findings)
        for result in report.findings:
            figure = f"{name} ({result.figure:.1e})"
            rows.setdefault((result.name, result.sentence.partition(" (")[0]), []).append(figure)
    lines = ["| check | finding | architectures (relative difference) |", "|---|---|---|"]
    lines += [f"| {name} | {sentence} | {', '.join(figures)} |" for (name, sentence), figures in rows.items()]
    count, seconds = sum(map(len, rows.values())), time.process_time() - start
    total = f"{len(models)} models, {checks} checks, {count} findings, {seconds:.0f} s of CPU time."
    return "\n".join([*lines, "", total])


if __name__ == "__main__":
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(table())
