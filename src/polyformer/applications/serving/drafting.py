"""Drafts of a server: a text without others in its batch may grow by several tokens in a step.

    step without drafts     reads the next token
    step with drafts        reads the next token and k proposed ones in one pass, and keeps the first that
                            are the most probable; the tokens after them are taken back from the caches

`models.generation.speculation` has the drafters, the look-up in the text and the small model. A pass over a
few tokens costs little more than one over a single token, because both read all weights; with several texts
in the batch the weights are read for many tokens anyway, and rows would have to advance by different numbers.
So drafts are for one running text, as of a single user, and for a greedy choice without penalties: then the
choice may be repeated, and a step ends before a token that was not proposed. Leviathan et al. 2023,
algorithm 1, at temperature 0.
"""

import dataclasses
from typing import Any

import torch

from polyformer.applications.serving.engine import Engine, Limits
from polyformer.applications.serving.rows import Row
from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.data import Tokenizer
from polyformer.models.generation import GenerationConfig
from polyformer.models.generation.config import SpeculationConfig
from polyformer.models.generation.decoder import DecodingState
from polyformer.models.generation.processors import blockwise_argmax
from polyformer.models.generation.results import DraftStatistics
from polyformer.models.generation.speculation import Draft, check_draft, make_drafter
from polyformer.nn.cache import CachePolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What proposes tokens, "lookup" or a model with the same tokens, and its numbers."""

    draft: Draft
    speculation: SpeculationConfig = SpeculationConfig()

    @property
    def most(self) -> int:
        """The most tokens that are proposed at once."""
        return self.speculation.most(self.draft == "lookup")


class DraftingEngine(Engine):
    """An engine with drafts for a text without others in the batch; other arguments as of `Engine`.

    drafted: the statistics so far. Raises `InputError` for a draft that does not fit the model, and for a
    model with states that cannot take tokens back.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        limits: Limits,
        cache: CachePolicy | None = None,
        *,
        drafting: Drafting,
    ):
        super().__init__(model, tokenizer, limits, cache)
        if drafting.draft == "self":
            raise InputError(
                "draft: 'self' is for texts of `generate`, and a server has no drafts by its model yet; use "
                "'lookup', or a small model"
            )
        config = GenerationConfig(cache=cache, speculation=drafting.speculation)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        check_draft(drafting.draft, config, model, ids, None, None, max_new_tokens=limits.tokens - 1)
        if not self.joins:
            raise InputError(
                "draft: the states of this model are not caches of all tokens, so that a server cannot take "
                "back what was proposed in vain; leave it out, or use it with polyformer generate"
            )
        self.most, self.drafted = drafting.most, DraftStatistics()
        self.drafter = make_drafter(drafting.draft, model, limits.tokens, (), blockwise_argmax, config)
        self.drafted_row: Row | None = None
        self.memory: State | None = None  # the drafter's, of the row above

    def _step(self) -> None:
        row = self.rows[0] if len(self.rows) == 1 else None
        if row is None or not row.plain:
            super()._step()
        elif not self._grows(row):
            if not row.job.cancelled.is_set():
                self._remember(0, row)
            self._keep([])
            self.drafted_row = self.memory = None

    def _grows(self, row: Row) -> bool:
        """Append the next token of the only row and accepted drafts; return whether the text continues.

        The state then has all tokens, or all but the last at the end of the text.
        """
        logits = self.next_logits[0]
        token = self._extended(row, logits, int(blockwise_argmax(logits)))
        if token is None:
            return False
        drafts = self._proposed(row)
        assert self.state is not None
        self._pack(1 + self.most)
        read = torch.tensor([[token, *drafts]], device=self.device)
        following, after = self.decoder.read(read, DecodingState(self.state), read.shape[1])
        best, accepted, goes_on = blockwise_argmax(following[0]).tolist(), 0, True
        while goes_on and accepted < len(drafts) and best[accepted] == drafts[accepted]:
            goes_on = self._extended(row, following[:, accepted], drafts[accepted]) is not None
            accepted += goes_on
        self.drafted = self.drafted.add(len(drafts), accepted + (not goes_on), 1)
        kept = after.truncated_(len(drafts) - accepted)
        assert kept is not None, "a cache of all tokens can take them back"
        self.state, self.next_logits = kept.model, [following[:, accepted]]
        return goes_on

    def _proposed(self, row: Row) -> list[int]:
        """Return tokens that may follow a row's text, without its last, which needs none after it."""
        count = min(self.most, row.width + row.job.most - row.length - 1)
        if count < 1:
            return []
        if self.drafted_row is not row:
            self.drafted_row = row
            self.memory = self.drafter.start(row.text[:, : row.width], None, None, {})
        drafts, self.memory = self.drafter.propose(row.text[:, : row.length], count, self.memory)
        return drafts.tokens[0].tolist()
