"""Baselines for a finished language model, a uniform and an n-gram model, and a text sample."""

import math

from polyformer.data import Splits
from polyformer.models.architectures import Transformer
from polyformer.models.generation import GenerationConfig, SamplingConfig
from polyformer.training.tasks import LanguageModelling
from polyformer.training.tasks.lm import text_metrics
from polyformer.training.tasks.ngram import NGram

Row = tuple[str, dict[str, float]]


def baselines(task: LanguageModelling, splits: Splits) -> list[Row]:
    """Return the validation metrics of the uniform distribution over tokens and of an n-gram model.

    Both are measured on the same tokens as the model, with the same counts of words and bytes.
    """
    order = task.config.ngram_order
    if not order or splits.validation is None:
        return []
    held = list(splits.validation)
    documents, counts = task.documents(held), task.count(held)
    vocabulary = len(task.tokenizer)
    tokens = sum(len(document) - 1 for document in documents)
    rows = [("uniform", text_metrics(tokens * math.log(vocabulary), tokens, counts))]
    model = NGram(task.documents(list(splits.train)), order, vocabulary)
    return [*rows, (f"{order}-gram (Kneser-Ney)", text_metrics(*model.nats(documents), counts))]


def sample(task: LanguageModelling, model: Transformer, seed: int, max_new_tokens: int = 160) -> str:
    """Return the prompt of the task and a sampled continuation, deterministic for a seed."""
    prompt = task.config.prompt
    budget = model.config.max_position_embeddings - len(task.start(prompt))
    drawing = SamplingConfig(do_sample=True, temperature=0.7, top_p=0.95, seed=seed)
    config = GenerationConfig(max_new_tokens=max(1, min(max_new_tokens, budget)), sampling=drawing)
    return prompt + task.generate(model, prompt, config)[0]


def table(rows: list[Row]) -> str:
    """Format rows of metrics as aligned text."""
    names = list(dict.fromkeys(name for _, metrics in rows for name in metrics))
    first = max(len(title) for title, _ in rows)
    lines = [" " * first + "".join(f"  {name.replace('_', ' '):>10}" for name in names)]
    for title, metrics in rows:
        cells = (
            f"{number(metrics[name]) if name in metrics else '':>{max(10, len(name))}}" for name in names
        )
        lines.append(f"{title:<{first}}  {'  '.join(cells)}")
    return "\n".join(lines)


def number(value: float) -> str:
    """Format a metric with four digits."""
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"
