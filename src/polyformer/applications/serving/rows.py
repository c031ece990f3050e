"""A text that a server generates: a row of the batch, with its own settings, numbers and end.

`generate` has the same settings for all rows of a call. Here each row has its own: its processors shape the
logits of its next token, its generator draws it, and its text ends by its rules. A row gets the tokens that
`generate` returns for a batch of this row with the same seed.

Penalties of OpenAI's API lower the logits of tokens by how often the new text c has them:

    logits_v - frequency_penalty * c_v - presence_penalty * [c_v > 0]
"""

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from polyformer.models.generation import GenerationConfig, TextStreamer
from polyformer.models.generation.constraints import Processor
from polyformer.models.generation.generate import GenerationTokens
from polyformer.models.generation.processors import blockwise_argmax, process, processors
from polyformer.models.generation.results import cut
from polyformer.models.generation.search import sampler

Reason: TypeAlias = Literal["stop", "length"]

LEAST = -9999.0
"""A log-probability of minus infinity, which JSON has not."""


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """A token, its log-probability under the model, and the most probable tokens in its place.

    logprob: None for the first token of a text. top: pairs of id and log-probability, the best first.
    """

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def scores_of(logits: Tensor, ids: Sequence[int], count: int) -> list[TokenScore]:
    """Return the scores of tokens `ids` [N] by the logits [N, V] of their places, with `count` others."""
    logs = logits.float().log_softmax(-1)
    own = logs.gather(1, torch.tensor(ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    best = logs.topk(min(count, logs.shape[1])) if count else None
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(ids)
    if best is not None:
        pairs = zip(best.indices.tolist(), best.values.tolist())
        tops = [tuple((i, max(value, LEAST)) for i, value in zip(*pair)) for pair in pairs]
    return [TokenScore(i, max(value, LEAST), top) for i, value, top in zip(ids, own, tops)]


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of a choice, and the scores of its tokens if they were requested."""

    index: int
    text: str
    scores: tuple[TokenScore, ...] = ()


@dataclasses.dataclass(frozen=True)
class PromptRead:
    """The prompt was read: the scores of its tokens, if they were requested.

    shared: how many of its tokens were read for an earlier text.
    """

    scores: tuple[TokenScore, ...] = ()
    shared: int = 0


@dataclasses.dataclass(frozen=True)
class Ended:
    """A choice ended: at an end token or a stop string ("stop"), or at a limit ("length")."""

    index: int
    reason: Reason


@dataclasses.dataclass(frozen=True)
class Failed:
    """No more of a request will be generated. overloaded: because others take the time that it needs."""

    message: str
    overloaded: bool = False


Event: TypeAlias = Piece | PromptRead | Ended | Failed


@dataclasses.dataclass(eq=False)
class Job:
    """A request: `count` continuations of a prompt `ids`.

    config: of generation, for a text each. most: new tokens, 0 for none. send: receives the events, in the
    thread of the engine. scores: how many probable tokens to report for each new token; None for no scores.
    prompt_scores: whether also for the tokens of the prompt. grammar: of the new text, a
    `grammars.Grammar`; None for any text. deadline: of the monotonic clock.
    """

    ids: list[int]
    config: GenerationConfig
    most: int
    send: Callable[[Event], None] = lambda event: None
    count: int = 1
    scores: int | None = None
    prompt_scores: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: Any = None
    deadline: float = float("inf")
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def late(self) -> bool:
        """Return whether the time of the request is over."""
        return time.monotonic() > self.deadline


def repeated_tokens(frequency: float, presence: float, width: int) -> Processor:
    """Lower the logits of tokens that the text after its first `width` tokens has; see above."""

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        new = history[:, width:]
        counts = torch.zeros_like(logits).scatter_add_(1, new, torch.ones_like(new, dtype=logits.dtype))
        return logits - frequency * counts - presence * (counts > 0)

    return apply


class Row:
    """A growing text of a job in the batch.

    tokens: of the model, with its end tokens. index: of the choice in the job.
    """

    def __init__(
        self,
        job: Job,
        index: int,
        tokens: GenerationTokens,
        decode: Callable[[Sequence[int]], str],
        device: Any,
    ):
        self.job, self.index, self.eos = job, index, frozenset(tokens.eos)
        config, width = job.config, len(job.ids)
        self.text = torch.zeros(1, width + job.most, dtype=torch.long, device=device)
        self.text[0, :width] = torch.tensor(job.ids)
        self.width = self.length = width
        self.processors: list[Processor] = processors(config, tokens.eos, width, device)
        if job.frequency_penalty or job.presence_penalty:
            penalty = repeated_tokens(job.frequency_penalty, job.presence_penalty, width)
            self.processors.insert(0, penalty)
        self.samples = config.method == "sample"
        self.choose = blockwise_argmax
        if self.samples:
            seed = config.sampling.seed
            number = secrets.randbits(63) if seed is None else (seed + index) % 2**63
            self.choose = sampler(torch.Generator(device).manual_seed(number))
        self.pieces: list[str] = []
        self.streamer = TextStreamer(decode, config.stop, self.pieces.append)
        self.streamer.begin([job.ids])

    @property
    def plain(self) -> bool:
        """Return whether the next token is simply the token with the highest logit."""
        return not self.processors and not self.samples

    def next_token(self, logits: Tensor) -> int:
        """Return the next token by its logits [1, V]."""
        return int(self.choose(process(self.processors, logits, self.text[:, : self.length])))

    def add(self, token: int, logits: Tensor) -> Reason | None:
        """Append a token that the logits [1, V] chose, and send its text; return why the text has ended."""
        self.text[0, self.length] = token
        self.length += 1
        job, streamer = self.job, self.streamer
        scores = () if job.scores is None else tuple(scores_of(logits, [token], job.scores))
        streamer(torch.tensor([token]))
        reason = self.reason_after(token)
        if reason is not None:
            streamer.finish()
        piece = "".join(self.pieces)
        self.pieces.clear()
        job.send(Piece(self.index, piece, scores))
        if reason is not None:
            job.send(Ended(self.index, reason))
        return reason

    def reason_after(self, token: int) -> Reason | None:
        """Return why the text ends after its last token, or None if it goes on."""
        if token in self.eos or self._stopped():
            return "stop"
        return "length" if self.length - self.width == self.job.most or self.job.late else None

    def _stopped(self) -> bool:
        stop = self.streamer.stop
        if not stop:
            return False
        text = self.streamer.text(self.streamer.tokens)
        return cut(text, stop) != text
