"""The model's distribution mixed with that of the neighbours: defined, optimized, measured, in generation.

Khandelwal et al. 2020 (kNN-LM), equations 2 and 3:

    p_kNN(y | x) ~ the sum of exp(-d(k_i, f(x)) / T) over the neighbours (k_i, v_i) with v_i = y
    p(y | x) = lambda p_kNN(y | x) + (1 - lambda) p_LM(y | x)

d is the squared Euclidean distance, as in the paper's code. f(x) is the input of the last feed-forward, after
its norm. The neighbours are the k nearest entries. `neighbour_probabilities` and `mixed` are the definition,
over keys that fit into memory, and `Mixture` searches a store.

`measured` evaluates a store on held-out text: perplexities of the mixture, and the best lambda and T. Only
log p_LM and, for each T (and k), p_kNN are kept of each token, so that any lambda can be evaluated without a
second search.

In generation a mixture replaces the logits. For models that only transformers can load, these are the output
of the model's own forward pass. Therefore all search strategies of transformers' `generate` use it, before
any logits processor, as in our own `generate`. A model with the head `semiparametric` (SPALM) reads the
neighbours itself: `Retrieval` searches them while it generates.
"""

import contextlib
import dataclasses
import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.applications.retrieval.readers import (
    ContextReader,
    Reading,
    TransformersReader,
    Window,
    windows,
)
from polyformer.applications.retrieval.store import (
    BATCH_TOKENS,
    MixtureConfig,
    Neighbours,
    Store,
    equally_long,
    tensors,
)
from polyformer.core.errors import InputError
from polyformer.core.modules import evaluating
from polyformer.models.architectures import Transformer
from polyformer.models.generation import ContinuedText, TextStreamer
from polyformer.models.outputs import ModelState
from polyformer.nn.stack.last_feedforward import LastFeedForwardInput


def neighbour_probabilities(
    queries: Tensor, keys: Tensor, values: Tensor, neighbours: int, temperature: float, vocabulary: int
) -> Tensor:
    """Return p_kNN [N, V] of queries [N, D] among the keys [M, D] with their next tokens, values [M]."""
    distances = (queries.unsqueeze(1) - keys.unsqueeze(0)).square().sum(-1)
    nearest = distances.topk(min(neighbours, len(keys)), largest=False)
    weights = (-nearest.values / temperature).softmax(-1)
    tokens = torch.nn.functional.one_hot(values[nearest.indices].long(), vocabulary)
    return (weights.unsqueeze(-1) * tokens).sum(1)


def mixed(model: Tensor, neighbours: Tensor, weight: float) -> Tensor:
    """Return p [N, V], mixed from the model's p_LM and p_kNN, both [N, V]; `weight` is the paper's lambda."""
    return weight * neighbours + (1 - weight) * model


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """log p = log(lambda p_kNN + (1 - lambda) p_LM), for `generate(mixture=)`."""

    store: Store
    config: MixtureConfig = MixtureConfig()

    def __call__(self, logits: Tensor, keys: Tensor) -> Tensor:
        """Return log p [N, K, V] from the model's logits [N, K, V] and the keys [N, K, D]."""
        near = self.store.search(keys.flatten(0, -2), self.config.neighbours)
        log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        mixed = self.mixed(log_p.flatten(0, -2), near)
        return mixed.view_as(log_p)

    def mixed(self, log_p: Tensor, near: Neighbours) -> Tensor:
        """Return log p [N, V] from the model's log p [N, V] and the neighbours of each row.

        Rows without neighbours keep the model's log p. Raises `InputError` for a neighbour with a token
        outside the model's vocabulary.
        """
        least, most = near.values.aminmax()
        if least < 0 or most >= log_p.shape[-1]:
            raise InputError(
                f"the datastore has a token {int(most if least >= 0 else least)}, beyond the model's "
                f"vocabulary of {log_p.shape[-1]}; it is damaged: see polyformer datastore verify"
            )
        weights = neighbour_weights(near.distances, self.config.temperature).to(log_p.dtype)
        share = log_p.new_zeros(log_p.shape).scatter_add(1, near.values, weights)
        own, theirs = log(1 - self.config.weight), log(self.config.weight)
        mixed = torch.logaddexp(log_p + own, share.log() + theirs)
        return torch.where(near.distances[:, :1].isfinite(), mixed, log_p)


def neighbour_weights(distances: Tensor, temperature: float) -> Tensor:
    """Return softmax(-d / T) [N, k] of distances [N, k], nearest first; zeros for rows without neighbours."""
    apart = distances - distances[:, :1]  # NaN if the nearest is infinite
    return (-apart / temperature).softmax(-1).nan_to_num(0.0)


def log(x: float) -> float:
    """Return the logarithm, minus infinity for 0."""
    return math.log(x) if x > 0 else -math.inf


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


@dataclasses.dataclass(frozen=True, eq=False)
class Retrieval:
    """The argument of `generate(retrieval=)`: a frozen `model` and the `store` that was built with it.

    The model reads every token next to the generating model. Its context is the whole text so far, not a
    window.
    """

    model: Transformer
    store: Store
    neighbours: int = 4

    def start(
        self, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
    ) -> tuple[Tensor, ModelState]:
        """Read the prompt [N, T]; return the neighbours [N, 1, k] of its last token and the state.

        `max_new_tokens` tokens follow. Raises `InputError` if the model cannot read that many tokens.
        """
        assert self.model.decoder is not None
        if self.neighbours < 1:
            raise InputError(f"--neighbours: expected 1 or more, got {self.neighbours}")
        length = input_ids.shape[1] + max_new_tokens
        limit = self.model.decoder.position.max_positions
        if limit is not None and length > limit:
            raise InputError(
                f"max_new_tokens: the frozen model reads {limit} tokens, and prompt and text have {length}"
            )
        return self._read(input_ids, attention_mask, self.model.new_state(length), 1)

    def read(self, tokens: Tensor, state: ModelState, last: int) -> tuple[Tensor, ModelState]:
        """Read tokens [N, T] after `state`; return neighbours [N, K, k] of the `last` K, and the state."""
        return self._read(tokens, None, state, last)

    @torch.no_grad()
    def _read(
        self, ids: Tensor, mask: Tensor | None, state: ModelState, last: int
    ) -> tuple[Tensor, ModelState]:
        with evaluating(self.model), LastFeedForwardInput(self.model.decoder) as read:  # type: ignore[arg-type]
            after = self.model(ids, attention_mask=mask, state=state).state
            keys = read.value[:, -last:].half().float()  # with the rounding of the store
        near = self.store.search(keys.flatten(0, 1), self.neighbours)
        tokens = near.values.masked_fill(near.distances.isinf(), -1)
        return tokens.view(*keys.shape[:2], -1), after


NEW_TOKENS = 64  # new tokens if neither the user nor the checkpoint sets their number


@contextlib.contextmanager
def mixed_in(model: Any, mixture: Mixture) -> Iterator[None]:
    """Replace the logits of a transformers model by log p of the next token, within the context."""

    def ask(module: Any, arguments: Any, named: dict[str, Any]) -> Any:
        return arguments, {**named, "output_hidden_states": True}

    def mix(module: Any, arguments: Any, output: Any) -> Any:
        output.logits = mixture(output.logits[:, -1:], output.hidden_states[-1][:, -1:])
        return output

    hooks = model.register_forward_pre_hook(ask, with_kwargs=True), model.register_forward_hook(mix)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Streamer:
    """A streamer of transformers that passes on the new tokens [1] without the prompt that precedes them."""

    def __init__(self, show: Callable[[Tensor], None]):
        self.show, self.prompt_seen = show, False

    def put(self, tokens: Tensor) -> None:
        """Receive the prompt [1, T], then each new token [1]."""
        if self.prompt_seen:
            self.show(tokens)
        self.prompt_seen = True

    def end(self) -> None:
        """Mark the end of the tokens."""


def generate(
    reader: TransformersReader,
    mixture: Mixture,
    prompt: str,
    settings: Mapping[str, Any],
    stop: Sequence[str] = (),
    show: Callable[[Tensor], None] | None = None,
) -> list[int]:
    """Return the tokens that follow `prompt`, by transformers' `generate` with its `settings` and a `seed`.

    Settings that are absent come from the checkpoint. The text ends after any of `stop`. `show` receives each
    token [1] when it is chosen, except in beam search. Raises `InputError` if there are more tokens than the
    model supports.
    """
    options = dict(settings)
    if options.get("do_sample"):
        options = {"num_beams": 1, "top_k": 0, **options}
    elif options.get("num_beams", 1) > 1:
        options["do_sample"] = False
    options.setdefault("max_new_tokens", reader.model.generation_config.max_new_tokens or NEW_TOKENS)
    seed = options.pop("seed", None)
    ids = prompt_ids(reader, prompt, options["max_new_tokens"])
    size, (before,) = ids.shape[1], ids.tolist()
    new_text = ContinuedText(reader.tokenizer.decode, before)
    if isinstance(show, TextStreamer):
        show.begin([before])

    def ended(sequences: Tensor, scores: Any, **_: Any) -> Tensor:
        texts = [new_text(row) for row in sequences[:, size:].tolist()]
        return torch.tensor([any(mark in text for mark in stop) for text in texts], device=sequences.device)

    pad = reader.model.generation_config.pad_token_id
    pad = reader.tokenizer.pad_id if pad is None else pad
    beams = options.get("num_beams") or reader.model.generation_config.num_beams or 1
    streamer = None if show is None or beams > 1 else Streamer(show)
    with torch.random.fork_rng(), mixed_in(reader.model, mixture):
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        sequences = reader.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0 if pad is None else pad,
            streamer=streamer,
            stopping_criteria=[ended] if stop else [],
            **options,
        )
    return sequences[0, size:].tolist()


def prompt_ids(reader: TransformersReader, prompt: str, new_tokens: int) -> Tensor:
    """Return the ids [1, T] of `prompt`, or the token that begins texts if it is empty.

    Raises `InputError` if `new_tokens` new tokens do not fit after it.
    """
    (ids,) = reader.encode([prompt])
    begin = reader.model.generation_config.bos_token_id
    if not ids and begin is None:
        raise InputError(
            "--prompt: expected a text; this model has no beginning-of-text token for an empty prompt"
        )
    ids = ids or [begin]
    if reader.longest is not None and len(ids) + new_tokens > reader.longest:
        raise InputError(
            f"--max-new-tokens: {len(ids)} prompt tokens and {new_tokens} new tokens exceed the limit of "
            f"{reader.longest} tokens of {reader.folder}"
        )
    return torch.tensor([ids], device=reader.model.device)
