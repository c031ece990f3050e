"""The engine of a server: one thread that reads prompts and generates the texts of all requests in a batch.

Continuous batching (Yu et al. 2022, Orca, section 3.2): the batch changes after every step. A loop of

    one chunk of the prompt of the oldest waiting request, without the beginning that an earlier text had
    (`prefixes`); once it is read, its rows join the batch (`states`)
    one step: a token for each row; rows that have ended leave the batch

so that a long prompt delays the others by a chunk, and a short text does not wait for a long text. Models
with states that cannot be joined (`can_join`) get batches that are formed from the waiting requests: their
prompts are read together with padding on the left, rows leave, and the next batch begins after the last row.

Requests come from other threads by `submit`, and events go back by `Job.send`. An error in a prompt ends
only its request.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from polyformer.applications.serving.grammars import ConstrainedRow
from polyformer.applications.serving.prefixes import KeptTexts
from polyformer.applications.serving.rows import (
    Ended,
    Event,
    Failed,
    Job,
    PromptRead,
    Row,
    TokenScore,
    scores_of,
)
from polyformer.applications.serving.states import can_join, joined, selected
from polyformer.core.errors import InputError
from polyformer.core.ops.cpu import model_threads
from polyformer.data import Tokenizer
from polyformer.models.generation.decoder import Decoder, DecodingState
from polyformer.models.generation.generate import special_ids
from polyformer.models.generation.processors import blockwise_argmax
from polyformer.models.outputs import ModelState
from polyformer.nn.cache import CachePolicy

CHUNK = 256
"""Tokens of a prompt that are read between two steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server.

    batch: texts that are generated at once. queue: texts that may wait. tokens: of a prompt and its new
    tokens together. seconds: of a request, from its arrival; a text ends then. body: bytes of a request.
    kept: tokens of earlier texts with a kept cache (`prefixes`); None for the number `tokens`.
    """

    batch: int = 16
    queue: int = 128
    tokens: int = 4096
    seconds: float = 600.0
    body: int = 2**22
    kept: int | None = None


class Overloaded(Exception):  # noqa: N818 - it is no error of the program
    """The queue is full, or the engine is ending."""


@dataclasses.dataclass
class PromptReading:
    """A prompt that is read in chunks. shared: its first tokens that were not read."""

    job: Job
    state: ModelState
    done: int = 0
    shared: int = 0
    scores: list[TokenScore] = dataclasses.field(default_factory=list)
    last: Tensor | None = None  # logits [1, V] of the token before the next chunk


class Load(NamedTuple):
    """The load of an engine: texts that are generated and that wait, and tokens so far.

    shared_tokens: of prompts, with a cache from an earlier text; they are not among `prompt_tokens`.
    """

    running: int
    waiting: int
    prompt_tokens: int
    new_tokens: int
    shared_tokens: int


class Engine:
    """Generates texts by `model`, a decoder in evaluation mode, for jobs of several threads.

    Use it as a context: its thread runs within, and finishes what was submitted at the end. cache: the policy
    of the KV cache of all texts; raises `InputError` for one that the model cannot have.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, limits: Limits, cache: CachePolicy | None = None):
        self.model, self.tokenizer, self.limits, self.cache = model, tokenizer, limits, cache
        self.device = next(model.parameters()).device
        self.decoder = Decoder(model, limits.tokens, compile=False, cache=cache)
        self.decoder.model.new_state(0, cache)
        self.joins = can_join(model, cache)
        self.changed = threading.Condition()
        self.waiting: collections.deque[Job] = collections.deque()
        self.closing = False
        self.reading: PromptReading | None = None
        self.rows: list[Row] = []
        self.state: ModelState | None = None
        self.next_logits: list[Tensor] = []  # [1, V] of each row
        self.packed_rows = 0
        self.prompt_tokens = self.new_tokens = self.shared_tokens = 0
        most = limits.tokens if limits.kept is None else limits.kept
        self.texts = KeptTexts(most) if self.joins and most else None
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self.thread.join()

    @property
    def load(self) -> Load:
        """Return the present load."""
        with self.changed:
            waiting = sum(job.count for job in self.waiting)
        return Load(len(self.rows), waiting, self.prompt_tokens, self.new_tokens, self.shared_tokens)

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self.thread.is_alive()

    def submit(self, *jobs: Job) -> None:
        """Add jobs to the queue; raise `Overloaded` if they do not fit into it."""
        if any(job.count > self.limits.batch for job in jobs):
            raise InputError(f"n: expected at most {self.limits.batch} texts for a prompt")
        with self.changed:
            waiting = sum(job.count for job in self.waiting)
            new = sum(job.count for job in jobs)
            if self.closing or waiting + new > self.limits.queue:
                raise Overloaded("the server is ending" if self.closing else "too many requests wait")
            self.waiting.extend(jobs)
            self.changed.notify()

    def close(self) -> None:
        """Accept no more jobs; the thread ends after those that were accepted."""
        with self.changed:
            self.closing = True
            self.changed.notify()

    def _run(self) -> None:
        with model_threads(self.model), torch.no_grad(), self.decoder.recording():
            while self._wait():
                try:
                    self._drop_ended()
                    self._admit()
                    self._step()
                except Exception as error:
                    self._fail(self.rows, error)

    def _wait(self) -> bool:
        """Wait for work; return whether there is some, or False at the end."""
        with self.changed:
            while not (self.waiting or self.reading or self.rows):
                if self.closing:
                    return False
                self.changed.wait()
        return True

    def _drop_ended(self) -> None:
        """Forget jobs of clients that have left, and waiting jobs that are late."""
        with self.changed:
            jobs = [*self.waiting]
            self.waiting = collections.deque(job for job in jobs if not (job.cancelled.is_set() or job.late))
        for job in jobs:
            if job.late:
                job.send(Failed("the request waited longer than its time", overloaded=True))
        if self.reading is not None and (self.reading.job.cancelled.is_set() or self.reading.job.late):
            if self.reading.job.late:
                self.reading.job.send(Failed("reading the prompt took longer than the request's time"))
            self.reading = None
        kept = [number for number, row in enumerate(self.rows) if not row.job.cancelled.is_set()]
        self._keep(kept)

    def _admit(self) -> None:
        """Read a part of a waiting prompt, or begin a batch of a model without joining rows."""
        if not self.joins:
            self._begin_batch()
            return
        if self.reading is None and self.waiting:
            job = self.waiting[0]
            if len(self.rows) + job.count > self.limits.batch:
                return
            with self.changed:
                self.waiting.popleft()
            self.reading = self._begun(job)
        if self.reading is not None:
            self._guarded([self.reading.job], self._read_chunk)

    def _begun(self, job: Job) -> PromptReading:
        """Return the reading of a prompt, after the tokens with a kept cache; scores need all tokens."""
        known = None if self.texts is None or job.prompt_scores else self.texts.longest_beginning(job.ids)
        if known is None:
            return PromptReading(job, self.model.new_state(len(job.ids), self.cache))
        self.shared_tokens += known.length
        return PromptReading(job, known.state, known.length, known.length)

    def _guarded(self, jobs: list[Job], action: Callable[[], None]) -> None:
        """Run a part of the work of jobs; an error ends only these jobs."""
        try:
            action()
        except Exception as error:
            self.reading = None
            for job in jobs:
                job.send(failure(error))

    def _read_chunk(self) -> None:
        reading = self.reading
        assert reading is not None
        job, start = reading.job, reading.done
        ids = job.ids[start : start + CHUNK]
        tokens = torch.tensor([ids], device=self.device)
        hidden, reading.state = self.model.following(tokens, reading.state)
        reading.done += len(ids)
        self.prompt_tokens += len(ids)
        if job.prompt_scores:
            logits = self.model.predictions(hidden)[0]
            count = job.scores or 0
            before = [] if reading.last is None else [reading.last]
            known = torch.cat([*before, logits[:-1]]) if before or len(ids) > 1 else logits[:0]
            reading.scores += [] if before else [TokenScore(ids[0], None)]
            reading.scores += scores_of(known, ids[-len(known) :] if len(known) else [], count)
            reading.last = logits[-1:]
        if reading.done == len(job.ids):
            self.reading = None
            logits = self.model.predictions(hidden[:, -1:])[:, 0]
            if self.texts is not None:
                self.texts.add(job.ids, reading.state)
            job.send(PromptRead(tuple(reading.scores), reading.shared))
            self._join(job, logits, reading.state)

    def _join(self, job: Job, logits: Tensor, state: ModelState) -> None:
        """Add the rows of a job after its prompt."""
        if job.most == 0:
            for index in range(job.count):
                job.send(Ended(index, "length"))
            return
        rows = self._rows_of(job)
        states = [] if self.state is None else [self.state]
        self.state = joined([*states, *[state] * job.count])
        self.rows += rows
        self.next_logits += [logits] * job.count

    def _rows_of(self, job: Job) -> list[Row]:
        tokens, decode = special_ids(self.model, job.config), self.tokenizer.decode
        kind = Row if job.grammar is None else ConstrainedRow
        return [kind(job, index, tokens, decode, self.device) for index in range(job.count)]

    def _begin_batch(self) -> None:
        """Read the prompts of waiting jobs together, if no row is left of the last batch."""
        if self.rows or not self.waiting:
            return
        jobs: list[Job] = []
        with self.changed:
            while self.waiting and sum(job.count for job in [*jobs, self.waiting[0]]) <= self.limits.batch:
                jobs.append(self.waiting.popleft())
        self._guarded(jobs, lambda: self._read_batch(jobs))

    def _read_batch(self, jobs: list[Job]) -> None:
        repeated = [job for job in jobs for _ in range(job.count if job.most else 1)]
        width = max(len(job.ids) for job in repeated)
        pad = self.model.config.special.pad or 0
        ids = torch.tensor([[pad] * (width - len(job.ids)) + job.ids for job in repeated], device=self.device)
        mask = torch.tensor(
            [[0] * (width - len(job.ids)) + [1] * len(job.ids) for job in repeated], device=self.device
        )
        start = self.decoder.start(ids, None if bool(mask.all()) else mask, None, {})
        self.prompt_tokens += sum(len(job.ids) for job in jobs)
        for job in jobs:
            job.send(PromptRead(self._prompt_scores(job) if job.prompt_scores else ()))
        rows, kept = [], []
        number = 0
        for job in jobs:
            if job.most == 0:
                for index in range(job.count):
                    job.send(Ended(index, "length"))
                number += 1
                continue
            rows += self._rows_of(job)
            kept += range(number, number + job.count)
            number += job.count
        if kept:
            self.state = start.state.model.reorder(torch.tensor(kept, device=self.device))
            self.rows, self.next_logits = rows, [start.logits[i : i + 1] for i in kept]

    def _prompt_scores(self, job: Job) -> tuple[TokenScore, ...]:
        """Return the scores of a prompt's tokens, by a separate pass."""
        state = None if self.cache is None else self.model.new_state(len(job.ids), self.cache)
        logits = self.model(torch.tensor([job.ids], device=self.device), state=state).logits[0]
        rest = scores_of(logits[:-1], job.ids[1:], job.scores or 0) if len(job.ids) > 1 else []
        return (TokenScore(job.ids[0], None), *rest)

    def _step(self) -> None:
        """Choose the next token of every row, and read it for the rows that continue."""
        if not self.rows:
            return
        logits = torch.cat(self.next_logits)
        highest = blockwise_argmax(logits).tolist() if any(row.plain for row in self.rows) else []
        tokens: list[int] = []
        kept: list[int] = []
        for number, row in enumerate(self.rows):
            token = self._extended(row, logits[number : number + 1], highest[number] if highest else None)
            if token is not None:
                kept.append(number)
                tokens.append(token)
            elif not row.job.cancelled.is_set():
                self._remember(number, row)
        self._keep(kept)
        if not self.rows:
            return
        assert self.state is not None
        self._pack(1 if len(tokens) == 1 else self.limits.batch)
        step = torch.tensor(tokens, device=self.device)
        following, after = self.decoder.step(step, DecodingState(self.state))
        self.state, self.next_logits = after.model, list(following.split(1))

    def _extended(self, row: Row, logits: Tensor, highest: int | None) -> int | None:
        """Append the next token of a row, and return it; None for a text that has ended, or failed.

        An error, as from settings that turn all logits into infinity, ends only this request.
        """
        try:
            token = highest if row.plain and highest is not None else row.next_token(logits)
            self.new_tokens += 1
            return token if row.add(token, logits) is None else None
        except Exception as error:
            row.job.send(failure(error))
            row.job.cancelled.set()
            return None

    def _remember(self, number: int, row: Row) -> None:
        """Keep the state of a text that has ended, before its last token; of a prompt's texts the first."""
        if self.texts is None or row.index or row.length > self.texts.most:
            return
        assert self.state is not None
        self.texts.add(row.text[0, : row.length - 1].tolist(), selected(self.state, [number]))

    def _pack(self, rows: int) -> None:
        """Choose the layout of weights for steps of up to this number of rows."""
        if rows != self.packed_rows:
            self.packed_rows, self.decoder.packed = rows, self.decoder.packing(rows)

    def _keep(self, numbers: list[int]) -> None:
        """Keep only these rows in the batch."""
        if len(numbers) == len(self.rows):
            return
        self.rows = [self.rows[number] for number in numbers]
        self.next_logits = [self.next_logits[number] for number in numbers]
        if not numbers:
            self.state = None
        elif self.joins:
            assert self.state is not None
            self.state = selected(self.state, numbers)
        else:
            assert self.state is not None
            self.state = self.state.reorder(torch.tensor(numbers, device=self.device))

    def _fail(self, rows: list[Row], error: Exception) -> None:
        """End all rows with an error, so that the next requests find an empty batch."""
        for job in dict.fromkeys(row.job for row in rows):
            job.send(failure(error))
        self.rows, self.next_logits, self.state = [], [], None


def failure(error: Exception) -> Event:
    """Return the event of an error; only messages for users are shown."""
    if isinstance(error, InputError):
        return Failed(str(error))
    return Failed(f"the server failed with {type(error).__name__}; other requests are not affected")


def deadline_after(seconds: float) -> float:
    """Return the time of the monotonic clock in `seconds`."""
    return time.monotonic() + seconds
