"""Training steps of decoders of GPT-2's kind."""

from collections.abc import Callable, Iterator
from typing import Any

from polyformer.bench.table.row import Asked, Case, Row
from polyformer.bench.training import TrainingBench, contenders

TINY: dict[str, Any] = {"layers": 1, "hidden_size": 8, "heads": 2, "vocab_size": 50, "batch": 2, "length": 8}


def _cases(config: TrainingBench) -> Callable[[bool], Iterator[Case]]:
    def cases(quick: bool) -> Iterator[Case]:
        size = TrainingBench(**TINY, optimizer=config.optimizer) if quick else config
        yield Case(contenders(size), flop=flop(size), tokens=size.batch * size.length)

    return cases


def flop(config: TrainingBench) -> float:
    """Of the products with weights in a step: forward, and twice as many backward. Attention, a few per cent
    at these lengths, is left out."""
    weights = 12 * config.layers * config.hidden_size**2 + config.vocab_size * config.hidden_size
    return 6.0 * weights * config.batch * config.length


GPT2 = TrainingBench()
MIDDLE = TrainingBench(
    layers=4, hidden_size=256, heads=4, vocab_size=8192, batch=16, length=256, optimizer="adamw"
)
SMALL = TrainingBench(
    layers=2, hidden_size=128, heads=4, vocab_size=1000, batch=16, length=128, optimizer="adamw"
)

ROWS = (
    Row(
        "gpt2-step",
        "GPT-2 124M, training step, 2 x 512 tokens",
        _cases(GPT2),
        (Asked("transformers", 1.3, narrow=1.15),),
        narrow_share=0.85,
        repeats=3,
    ),
    Row(
        "middle-step",
        "4 layers of 256, training step with AdamW, 16 x 256 tokens",
        _cases(MIDDLE),
        (Asked("transformers", 1.15),),
        repeats=9,
    ),
    Row(
        "small-step",
        "2 layers of 128, training step with AdamW, 16 x 128 tokens",
        _cases(SMALL),
        (Asked("transformers", 1.1),),
        repeats=25,
    ),
)
