"""Evaluation of a store on held-out text: perplexities of the mixture, and the best lambda and T.

Only log p_LM and, for each T (and k), p_kNN are kept of each token, so that any lambda can be evaluated
without a second search.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from polyformer.applications.retrieval.build import BATCH_TOKENS, equally_long, tensors
from polyformer.applications.retrieval.mixture import log, neighbour_weights
from polyformer.applications.retrieval.readers import ContextReader
from polyformer.applications.retrieval.store import MixtureConfig, Neighbours, Store
from polyformer.applications.retrieval.windows import Reading, Window, windows
from polyformer.core.errors import InputError

STEPS = [2.0 ** (power / 2) for power in range(-12, 5)]
"""Temperatures that are tried, in units of the mean spread of a context's neighbours."""


@dataclasses.dataclass(frozen=True, eq=False)
class Targets:
    """Results for the n tokens of a text."""

    log_p: Tensor  # [n], of the model
    shares: Tensor  # [n, K, S], p_kNN with each of `counts` neighbours and `temperatures`
    counts: tuple[int, ...]
    temperatures: tuple[float, ...]
    seconds: tuple[float, float]  # of the model, and of the search

    def losses(self, weight: float) -> Tensor:
        """Return the mean -log p per token [K, S], with lambda = `weight`."""
        own, theirs = log(1 - weight), log(weight)
        mixed = torch.logaddexp(self.log_p[:, None, None] + own, self.shares.log() + theirs)
        return -mixed.mean(0)

    def best(self, count: int = 0) -> tuple[MixtureConfig, float]:
        """Return the lambda and T with the smallest loss for `counts[count]` neighbours, and that loss."""
        losses = torch.stack([self.losses(weight)[count] for weight in WEIGHTS])
        row, column = divmod(int(losses.argmin()), losses.shape[1])
        config = MixtureConfig(
            weight=WEIGHTS[row], temperature=self.temperatures[column], neighbours=self.counts[count]
        )
        return config, float(losses[row, column])


WEIGHTS = [number / 50 for number in range(50)]  # values of lambda that are tried


def measured(
    reader: ContextReader,
    store: Store,
    texts: Iterable[str],
    counts: tuple[int, ...],
    temperatures: Sequence[float] | None = None,
    tokens: int | None = None,
    reading: Reading | None = None,
) -> Targets:
    """Read at most `tokens` of `texts` and search the neighbours of every context.

    By default the text is read like the store's text, and `temperatures` are derived from the distances of
    the first batch. If documents are isolated, the first token of each is no target. Raises `InputError` for
    a text without targets.
    """
    reading = reading or store.manifest.reading
    log_p, shares, seconds = [], [], [0.0, 0.0]
    for batch in batched(windows(reader.documents(texts), reading), reading.length, tokens):
        start = time.monotonic()
        queries, targets, batch_log_p = contexts(reader, batch)
        middle = time.monotonic()
        near = store.search(queries, max(counts))
        if temperatures is None:
            temperatures = [step * spread(near.distances) for step in STEPS]
        log_p.append(batch_log_p)
        shares.append(target_shares(near, targets, counts, temperatures).cpu())
        seconds = [seconds[0] + middle - start, seconds[1] + time.monotonic() - middle]
    if not log_p or temperatures is None:
        raise InputError("the text to evaluate on is too short: at least two tokens are required")
    return Targets(torch.cat(log_p), torch.cat(shares), counts, tuple(temperatures), (seconds[0], seconds[1]))


def batched(all_windows: Iterator[Window], length: int, tokens: int | None) -> Iterator[list[Window]]:
    """Yield windows in batches, up to the limit of `tokens`."""
    number = None if tokens is None else -(-tokens // length)
    limited = itertools.islice(all_windows, number)
    while batch := list(itertools.islice(limited, max(1, BATCH_TOKENS // length))):
        yield batch


def contexts(reader: ContextReader, batch: list[Window]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries [n, D], tokens [n] and log p_LM [n] of all targets of a batch."""
    queries, targets, log_p = [], [], []
    for group in equally_long(batch):
        keys, logits = reader.read(*tensors(reader, group))
        for window, rows, scores in zip(group, keys, logits()):
            ids = torch.from_numpy(window.ids[1:].astype(np.int64)).to(rows.device)
            counted = torch.arange(len(ids)) >= window.carried
            if reader.isolated:
                counted &= torch.from_numpy(window.documents[1:] == window.documents[:-1])
            places = counted.nonzero().squeeze(1).to(rows.device)
            log_p.append(scores[places].float().log_softmax(-1).gather(1, ids[places, None]).squeeze(1).cpu())
            queries.append(rows[places])
            targets.append(ids[places])
    return torch.cat(queries), torch.cat(targets), torch.cat(log_p)


def target_shares(
    near: Neighbours, targets: Tensor, counts: Sequence[int], temperatures: Sequence[float]
) -> Tensor:
    """Return p_kNN [n, K, S] of the targets [n], for each of `counts` and `temperatures`."""
    hits = (near.values == targets.unsqueeze(1)).float()
    shares = torch.empty(len(targets), len(counts), len(temperatures), device=targets.device)
    for column, temperature in enumerate(temperatures):
        for row, count in enumerate(counts):
            weights = neighbour_weights(near.distances[:, :count], temperature)
            shares[:, row, column] = (weights * hits[:, :count]).sum(1)
    return shares


def spread(distances: Tensor) -> float:
    """Return the spread of neighbours: the mean over contexts of the mean minus the least distance."""
    finite = torch.where(distances.isfinite(), distances, distances[:, :1])
    apart = (finite - finite[:, :1]).nan_to_num(0.0).mean(1)
    return float(apart.mean().clamp_min(1e-6))
