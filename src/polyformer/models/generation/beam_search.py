"""Beam search: search for the most likely whole text along `num_beams` beginnings in parallel.

    score(Y) = log P(Y | X) / divisor(|Y|)          (`BeamConfig.divisor`; |Y| counts the end token)

Each step extends every beam by every token and keeps the best. Among the 2 num_beams best extensions (more if
several tokens end a text), those that end are set aside if they are among the first num_beams; the best
num_beams that do not end continue. Wu et al. 2016, section 7; Vaswani et al. 2017, section 6.1.

Diverse beam search has groups of beams, each penalized for the tokens of earlier groups:

    score_g(Y) = sum_t [log P(y_t | y_<t, X) - diversity_penalty count_g(t, y_t)]  /  divisor(|Y|)

count_g(t, v) is the number of beams of the groups before g that continue with token v at step t. The groups
take their steps one after another; each is a beam search of num_beams / num_beam_groups beams, and the best
texts of all groups are returned. Vijayakumar et al. 2018 (Diverse beam search), section 4, with Hamming
diversity. Plain beam search is a single group.

A finished group (`BeamConfig.early_stopping`) no longer takes part; an input leaves the batch when all its
groups are finished.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.models.generation.config import BeamConfig
from polyformer.models.generation.decoder import Decoder, DecodingStart, DecodingState
from polyformer.models.generation.processors import blockwise_topk, process
from polyformer.models.generation.results import SearchResult
from polyformer.models.generation.search import SearchSettings


class FinishedTexts:
    """The best finished texts of one input, or of a group of its beams; `wanted` of them will be returned."""

    def __init__(self, config: BeamConfig, wanted: int, max_length: int):
        self.config, self.max_length = config, max_length
        self.size = config.num_beams // config.num_beam_groups
        self.wanted = min(wanted, self.size)
        self.best: list[tuple[float, Tensor]] = []

    def add(self, log_probability: float, tokens: Tensor) -> None:
        """Add a finished text [L]."""
        self.best.append((log_probability / self.config.divisor(len(tokens)), tokens))
        self.best.sort(key=lambda text: -text[0])
        del self.best[self.size :]

    def is_done(self, log_probability: float, length: int) -> bool:
        """Return whether to stop, given the log P of the best beam of `length` tokens; see `BeamConfig`.

        A beam's log P can only decrease, so its score is at most its log P divided by the larger divisor of
        the shortest and the longest possible length. "never" stops if this bound cannot beat the finished
        texts, which never changes the result.
        """
        config = self.config
        if config.early_stopping == "never":
            needed = self.wanted
            divisor = max(config.divisor(length + 1), config.divisor(self.max_length))
        else:
            needed, divisor = self.size, config.divisor(length)
        if len(self.best) < needed:
            return False
        return config.early_stopping is True or log_probability / divisor <= self.best[needed - 1][0]


@dataclasses.dataclass(frozen=True, eq=False)
class Beams:
    """K beams for each of R inputs. scores: [R, K], log P. tokens: [R, K, L], generated so far."""

    scores: Tensor
    tokens: Tensor

    def extended(self, log_probabilities: Tensor, count: int) -> tuple["Beams", Tensor]:
        """Return the best `count` extensions in order by log P [R K, V], and their parent beams
        [R, count].
        """
        vocabulary = log_probabilities.shape[1]
        totals = self.scores.unsqueeze(2) + log_probabilities.view(*self.scores.shape, vocabulary)
        totals = totals.flatten(1)  # [R, K V]
        scores, index = blockwise_topk(totals, min(count, totals.shape[1]))
        parents = index // vocabulary
        tokens = torch.cat([_pick(self.tokens, parents), (index % vocabulary).unsqueeze(2)], 2)
        return Beams(scores, tokens), parents

    def without(self, ended: Tensor, count: int) -> tuple["Beams", Tensor]:
        """Return the best `count` beams that are not `ended`, and their indices."""
        scores, index = self.scores.masked_fill(ended, -torch.inf).topk(count)
        return Beams(scores, _pick(self.tokens, index)), index


class BeamGroup:
    """A group of beams of all active inputs, with its finished texts."""

    def __init__(
        self, start: DecodingStart[DecodingState], rules: SearchSettings, config: BeamConfig, wanted: int
    ):
        inputs, self.device = len(start.logits), start.logits.device
        self.rules, self.config, self.size = rules, config, config.num_beams // config.num_beam_groups
        # log P of a long text needs more than half precision
        self.dtype = torch.promote_types(start.logits.dtype, torch.float32)
        self.owners = [FinishedTexts(config, wanted, rules.max_new_tokens) for _ in range(inputs)]
        self.inputs = [*range(inputs)]  # the active ones
        # a single beam at first: equal beams would have equal extensions
        zeros = torch.zeros(inputs, 1, dtype=self.dtype, device=self.device)
        self.beams = Beams(zeros, start.history.new_empty(inputs, 1, 0))
        self.finished = torch.zeros(inputs, dtype=torch.bool, device=self.device)

    def step(self, logits: Tensor, history: Tensor, counts: Tensor | None, length: int) -> Tensor:
        """Extend the beams by the logits [R K, V]; add its tokens to `counts` [R, V] for later groups.

        Returns the parent beam [R, size] of each beam.
        """
        rules, last = self.rules, length == self.rules.max_new_tokens
        width = self.beams.scores.shape[1]
        log_probabilities = logits.log_softmax(-1, dtype=self.dtype)
        if rules.processors:
            texts = torch.cat([history.repeat_interleave(width, 0), self.beams.tokens.flatten(0, 1)], 1)
            log_probabilities = process(rules.processors, log_probabilities, texts)
        if counts is not None:
            penalty = self.config.diversity_penalty * counts.repeat_interleave(width, 0)
            log_probabilities = log_probabilities - penalty
        # so many that `size` of them do not end: each beam has one extension per end token
        many = (1 + max(1, len(rules.stopping.eos))) * self.size
        candidates, parents = self.beams.extended(log_probabilities, many)
        owners = [row for row in self.inputs for _ in range(parents.shape[1])]
        ended = rules.stopping.ended(candidates.tokens.flatten(0, 1), owners).view_as(parents)
        active = ~self.finished.unsqueeze(1)
        self._collect(candidates, (ended | last) & active, last)
        self.beams, chosen = candidates.without(ended, self.size)
        if counts is not None:
            continuing = (self.beams.scores.isfinite() & active).to(counts.dtype)
            counts.scatter_add_(1, self.beams.tokens[..., -1], continuing)
        best = self.beams.scores[:, 0].tolist()
        now = [owner.is_done(score, length) for owner, score in zip(self.owners, best)]
        self.finished = self.finished | torch.tensor(now, dtype=torch.bool, device=self.device)
        return parents.gather(1, chosen)

    def _collect(self, candidates: Beams, ended: Tensor, last: bool) -> None:
        """Give every ended candidate among the first `size` to its owner, at the `last` step all of them."""
        scores = candidates.scores[:, : self.size]
        # a forbidden text has log P of -inf; at the last step it may be the only one
        counts = (ended[:, : self.size] & (scores.isfinite() | last)).nonzero()
        for (row, rank), score in zip(counts.tolist(), scores[counts[:, 0], counts[:, 1]].tolist()):
            self.owners[row].add(score, candidates.tokens[row, rank])

    def keep(self, rows: list[int], index: Tensor) -> None:
        """Keep only these inputs, given both as numbers and as an index tensor."""
        self.beams = Beams(self.beams.scores[index], self.beams.tokens[index])
        self.owners, self.finished = [self.owners[row] for row in rows], self.finished[index]
        self.inputs = [self.inputs[row] for row in rows]


def beam_search(
    decoder: Decoder,
    start: DecodingStart[DecodingState],
    rules: SearchSettings,
    config: BeamConfig,
    wanted: int,
) -> SearchResult:
    """Return the `wanted` best texts of all groups of every input."""
    inputs, device = len(start.logits), start.logits.device
    groups = [BeamGroup(start, rules, config, wanted) for _ in range(config.num_beam_groups)]
    finished = [[group.owners[row] for group in groups] for row in range(inputs)]
    state, history, counts = start.state, start.history, None
    logits = start.logits.unsqueeze(1).expand(-1, len(groups), -1)  # [R, groups * beams, V]
    for length in range(1, rules.max_new_tokens + 1):
        rows, beams = len(history), logits.shape[1] // len(groups)
        if len(groups) > 1:
            counts = torch.zeros(rows, logits.shape[2], dtype=groups[0].dtype, device=device)
        origins = []
        for number, (group, own) in enumerate(zip(groups, logits.split(beams, 1))):
            parents = group.step(own.flatten(0, 1), history, counts, length)
            origins.append(parents if length == 1 else parents + number * beams)
        ended = torch.stack([group.finished for group in groups]).all(0).tolist()
        stay = [row for row in range(rows) if not ended[row]]
        if length == rules.max_new_tokens or not stay:
            break
        index = torch.tensor(stay, device=device)
        places = 1 if length == 1 else len(groups) * beams  # rows of the state for each input
        origin = (index.unsqueeze(1) * places + torch.cat(origins, 1)[index]).flatten()
        state = reorder_state(state, origin, spread=length == 1 or len(stay) < rows)
        for group in groups:
            group.keep(stay, index)
        history = history[index]
        tokens = torch.cat([group.beams.tokens[..., -1] for group in groups], 1)
        following, state = decoder.step(tokens.flatten(), state)
        logits = following.view(len(stay), tokens.shape[1], -1)
    best = [
        sorted((text for group in own for text in group.best), key=lambda text: -text[0])[:wanted]
        for own in finished
    ]
    return padded_result(best, rules, groups[0].beams.scores)


def reorder_state(state: DecodingState, origin: Tensor, spread: bool) -> DecodingState:
    """Return the state of the rows `origin`.

    Unless `spread`, every row stays with its input, and often at its index.
    """
    if spread:
        return state.reorder(origin)
    # most steps keep the order of the beams, and then nothing is copied
    if torch.equal(origin, torch.arange(len(origin), device=origin.device)):
        return state
    return state.reorder_beams(origin)


def _pick(tokens: Tensor, index: Tensor) -> Tensor:
    """Return the rows index [R, K] of tokens [R, K', L]."""
    return tokens.gather(1, index.unsqueeze(2).expand(-1, -1, tokens.shape[2]))


def padded_result(
    texts: list[list[tuple[float, Tensor]]], rules: SearchSettings, like: Tensor
) -> SearchResult:
    """Return the texts of every input, padded, with their scores in the dtype of `like`."""
    best = [text for some in texts for text in some]
    tokens = best[0][1].new_full((len(best), rules.max_new_tokens), rules.pad)
    for row, (_, text) in zip(tokens, best):
        row[: len(text)] = text
    lengths = tokens.new_tensor([len(text) for _, text in best])
    return SearchResult(tokens, lengths, like.new_tensor([score for score, _ in best]))
