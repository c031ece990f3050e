"""One trained language model from several sides: its text, longer texts, recall, and the cost of a step.

*Recall in text* (Arora et al. 2024, Zoology, section 3): a token completes a pair that the segment has held
before, and that training has seen so seldom that it is recalled from the segment, not from the weights.
"""

import dataclasses
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.measuring import time_once
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.training.recipes.fit import Fitted
from polyformer.training.tasks import LanguageModelling
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.costs import peak_mib
from polyformer_lab.measures.long_texts import batches, first_tokens

REPEATS = 5


@measurement()
def parts(cell: Cell, length: int, longer: int, held_out: int, seldom: int, cost_length: int) -> Row:
    """Return nats per token, and milliseconds and MiB of a forward and backward pass.

    Args:
        cell: the cell; its model is measured.
        length, longer: tokens of a segment, as in training and more.
        held_out: validation tokens that are read.
        seldom: how often the training text has a pair at most that counts as recalled.
        cost_length: tokens of the row whose passes are timed.
    """
    fitted = cell.fitted
    model, ids = fitted.model.eval(), first_tokens(fitted, held_out)
    nats, recalled = recall_in_text(model, ids, length, pairs_of(training_tokens(fitted), model), seldom)
    further, _ = recall_in_text(model, ids, longer, {}, seldom)
    case, warm = Step(model.config.to_dict(), cost_length), Step(model.config.to_dict(), length)
    call = step(case)
    call()
    return {
        "nats": float(nats.mean()),
        "recalled": float(nats[recalled].mean()) if recalled.any() else None,
        "share": float(recalled.double().mean()),
        "elsewhere": float(nats[~recalled].mean()),
        "longer": float(further.mean()),
        "milliseconds": 1000 * min(time_once(call) for _ in range(REPEATS)),
        "mebibytes": peak_mib(step, case, warm, "cpu"),
        "parameters": float(sum(weight.numel() for weight in model.parameters())),
    }


def training_tokens(fitted: Fitted) -> Tensor:
    """Return the tokens of the training text, [N]."""
    assert isinstance(fitted.task, LanguageModelling)
    documents = fitted.task.rows.documents(list(fitted.splits.train))
    return torch.tensor(list(itertools.chain.from_iterable(documents)))


def pairs_of(ids: Tensor, model: Transformer) -> dict[int, int]:
    """Return how often each pair of neighbours (a, b) occurs in ids [N], by the number a V + b."""
    pairs, counts = (ids[:-1] * model.config.vocab_size + ids[1:]).unique(return_counts=True)
    return dict(zip(pairs.tolist(), counts.tolist()))


@torch.no_grad()
def recall_in_text(
    model: Transformer, ids: Tensor, length: int, seen: dict[int, int], seldom: int
) -> tuple[Tensor, Tensor]:
    """Return the nats of all tokens of ids [N] but the first, and which of them are recalled: [N - 1] each.

    seen: how often the training text has each pair (`pairs_of`).
    """
    nats, recalled = [], []
    for batch in batches(ids, length):
        logits = model(input_ids=batch).logits[:, :-1]
        nats.append(F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none"))
        pairs = (batch[:, :-1] * model.config.vocab_size + batch[:, 1:]).tolist()
        for row in pairs:
            earlier: set[int] = set()
            for pair in row:
                recalled.append(pair in earlier and seen.get(pair, 0) <= seldom)
                earlier.add(pair)
    return torch.cat(nats), torch.tensor(recalled)


@dataclasses.dataclass(frozen=True)
class Step:
    """A forward and backward pass of a new model: its configuration, and the tokens of a row."""

    config: dict[str, object]
    length: int


def step(case: Step) -> Callable[[], object]:
    """Return the passes of a case as a call."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig.from_dict(case.config)).train()
    ids = torch.randint(model.config.vocab_size, (1, case.length))

    def call() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    return call
