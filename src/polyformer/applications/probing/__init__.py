"""Probes of long texts: does a model still find information at a length, not only a low perplexity?

    model = ProbedModel.of(model, tokenizer)
    results = probe(model, ["niah_single_2", "vt"], [1024, 4096], read_text(None), ProbeConfig(samples=50))

The tasks are RULER's (Hsieh et al. 2024), generated from a seed. Prompts are filled to a number of tokens of
the model's tokenizer, and answers are scored by the texts that they contain.
"""

from polyformer.applications.probing.probe import (
    TASKS,
    ProbeAnswer,
    ProbeConfig,
    ProbedModel,
    ProbeResult,
    ProbeText,
    Prompt,
    PromptFormat,
    fill,
    find_task,
    probe,
    prompts,
    read_text,
    score_table,
    task_names,
)
from polyformer.applications.probing.tasks import ProbeTask, Sample, match_all, match_any

__all__ = [
    "TASKS",
    "ProbeAnswer",
    "ProbeConfig",
    "ProbeResult",
    "ProbeTask",
    "ProbeText",
    "ProbedModel",
    "Prompt",
    "PromptFormat",
    "Sample",
    "fill",
    "find_task",
    "match_all",
    "match_any",
    "probe",
    "prompts",
    "read_text",
    "score_table",
    "task_names",
]
