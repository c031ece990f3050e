"""Evaluations of texts that processes share: the metrics are those of one process that reads them whole."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launching import launch, run_checks
from polyformer.core.sequence.context_parallel import context_parallel, gather_sequence
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks.base import TaskConfig

TEXT = "A text that goes on for some words, so that there are tokens for every process and padding too."

TAGGED = [
    {"tokens": words, "tags": [("B-A", "I-A", "O", "O")[n % 4] for n in range(len(words))]}
    for words in (TEXT.split(), ["Anna", "flew", "to", "Oslo"])
]

TASKS: list[tuple[str, dict[str, Any], str, list[Any]]] = [
    ("lm", {"row_length": 40}, "decoder-tiny", [{"text": TEXT}, {"text": TEXT[::-1]}]),
    ("mlm", {"row_length": 40}, "encoder-tiny", [{"text": TEXT}, {"text": TEXT[::-1]}]),
    ("tag", {}, "encoder-tiny", TAGGED),
    ("translate", {}, "transformer-tiny", [{"source": TEXT, "target": TEXT[::-1]}]),
]
"""Name, options, preset and rows of tasks that measure in every way: losses, tokens, entities, pairs."""


def metrics_are_those_of_one_process() -> None:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    for kind, options, preset, rows in TASKS:
        config = TaskConfig.from_dict({"kind": kind, "batch_tokens": 256, **options}).resolve(rows)
        task = config.build(tokenizer)
        torch.manual_seed(0)
        model = Transformer(task.adapt(model_config(preset))).double().eval()
        held = task.rows.held_out(rows)
        counts = tokens_read(model)
        expected = task.metrics.measure(model, held)
        tokens = counts.pop()
        with context_parallel():
            spread = task.metrics.measure(model, held)
        assert counts.pop() < 0.8 * tokens, f"{kind}: a process read more than its share"
        assert spread == pytest.approx(expected, rel=1e-10), kind
        assert len({str(metrics) for metrics in gathered(spread)}) == 1, f"{kind}: processes differ"


def tokens_read(model: nn.Module) -> list[int]:
    """A list whose last number, after a call, is how many tokens the last layer read since it was popped."""
    counts: list[int] = []

    def count(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        counts[:] = [sum(counts) + output.shape[0] * output.shape[1]]

    stack = model.decoder or model.encoder
    stack.layers[-1].feedforward.register_forward_hook(count)
    return counts


def gathered(value: object) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def tables_are_made_whole() -> None:
    slots = torch.arange(dist.get_rank(), 7, dist.get_world_size())
    whole = torch.arange(14).view(2, 7)
    assert torch.equal(gather_sequence(whole, None), whole)
    with context_parallel():
        assert torch.equal(gather_sequence(whole[:, slots], slots), whole)


def test_metrics_of_shared_texts_are_those_of_one_process():
    launch(__file__)


if __name__ == "__main__":
    checks = metrics_are_those_of_one_process, tables_are_made_whole
    run_checks({2: checks, 3: checks})
