"""Beam search: search for the most likely whole text along `num_beams` beginnings in parallel.

    score(Y) = log P(Y | X) / divisor(|Y|)          (`BeamConfig.divisor`; |Y| counts the end token)

Each step extends every beam by every token and keeps the best. Among the 2 num_beams best extensions (more if
several tokens end a text), those that end are set aside if they are among the first num_beams; the best
num_beams that do not end continue. Wu et al. 2016, section 7; Vaswani et al. 2017, section 6.1.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.models.generation.config import BeamConfig
from polyformer.models.generation.decoder import Decoder, DecodingStart, DecodingState
from polyformer.models.generation.processors import process
from polyformer.models.generation.results import SearchResult
from polyformer.models.generation.search import SearchSettings
from polyformer.models.generation.topk import blockwise_topk


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
        totals = (self.scores.unsqueeze(2) + log_probabilities.view(*self.scores.shape, vocabulary)).flatten(
            1
        )
        scores, index = blockwise_topk(totals, min(count, totals.shape[1]))
        parents = index // vocabulary
        tokens = torch.cat([_pick(self.tokens, parents), (index % vocabulary).unsqueeze(2)], 2)
        return Beams(scores, tokens), parents

    def without(self, ended: Tensor, count: int) -> tuple["Beams", Tensor]:
        """Return the best `count` beams that are not `ended`, and their indices."""
        scores, index = self.scores.masked_fill(ended, -torch.inf).topk(count)
        return Beams(scores, _pick(self.tokens, index)), index


def beam_search(
    decoder: Decoder,
    start: DecodingStart[DecodingState],
    rules: SearchSettings,
    config: BeamConfig,
    wanted: int,
) -> SearchResult:
    """Return the `wanted` best texts of every input. Finished inputs leave the batch."""
    inputs, device = len(start.logits), start.logits.device
    many = num_extensions(rules, config.num_beams)
    finished = [FinishedTexts(config, wanted, rules.max_new_tokens) for _ in range(inputs)]
    dtype = torch.promote_types(start.logits.dtype, torch.float32)
    beams = Beams(torch.zeros(inputs, 1, dtype=dtype, device=device), start.history.new_empty(inputs, 1, 0))
    logits, state, history, owners = start.logits, start.state, start.history, finished
    for length in range(1, rules.max_new_tokens + 1):
        width = beams.scores.shape[1]
        log_probabilities = logits.log_softmax(-1, dtype=dtype)
        if rules.processors:
            texts = torch.cat([history.repeat_interleave(width, 0), beams.tokens.flatten(0, 1)], 1)
            log_probabilities = process(rules.processors, log_probabilities, texts)
        candidates, parents = beams.extended(log_probabilities, many)
        ended = rules.stopping.ended(candidates.tokens.flatten(0, 1)).view_as(parents)
        if length == rules.max_new_tokens:
            ended = torch.ones_like(ended)
        collect_finished(owners, candidates, ended, config.num_beams, last=length == rules.max_new_tokens)
        beams, chosen = candidates.without(ended, config.num_beams)
        best = beams.scores[:, 0].tolist()
        stay = [row for row, owner in enumerate(owners) if not owner.is_done(best[row], length)]
        if length == rules.max_new_tokens or not stay:
            break
        rows = torch.tensor(stay, device=device)
        origin = (rows.unsqueeze(1) * width + parents.gather(1, chosen)[rows]).flatten()
        state = reorder_state(state, origin, spread=width < config.num_beams or len(stay) < len(owners))
        beams, history = Beams(beams.scores[rows], beams.tokens[rows]), history[rows]
        owners = [owners[row] for row in stay]
        logits, state = decoder.step(beams.tokens[..., -1].flatten(), state)
    return padded_result([owner.best[:wanted] for owner in finished], rules, beams.scores)


def num_extensions(rules: SearchSettings, num_beams: int) -> int:
    """Return the number of extensions to consider, so that `num_beams` of them do not end."""
    return (1 + max(1, len(rules.stopping.eos))) * num_beams


def reorder_state(state: DecodingState, origin: Tensor, spread: bool) -> DecodingState:
    """Return the state of the rows `origin`.

    Unless `spread`, every row stays with its input, and often at its index.
    """
    if spread:
        return state.reorder(origin)
    if torch.equal(origin, torch.arange(len(origin), device=origin.device)):
        return state
    return state.reorder_beams(origin)


def _pick(tokens: Tensor, index: Tensor) -> Tensor:
    """Return the rows index [R, K] of tokens [R, K', L]."""
    return tokens.gather(1, index.unsqueeze(2).expand(-1, -1, tokens.shape[2]))


def collect_finished(
    finished: list[FinishedTexts], candidates: Beams, ended: Tensor, num_beams: int, last: bool
) -> None:
    """Give every ended candidate among the first `num_beams` to its owner, at the `last` step all of them."""
    scores = candidates.scores[:, :num_beams]
    counts = (ended[:, :num_beams] & (scores.isfinite() | last)).nonzero()
    for (row, rank), score in zip(counts.tolist(), scores[counts[:, 0], counts[:, 1]].tolist()):
        finished[row].add(score, candidates.tokens[row, rank])


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
