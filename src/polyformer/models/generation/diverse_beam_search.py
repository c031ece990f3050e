"""Diverse beam search: groups of beams, each penalized for the tokens of earlier groups.

    score_g(Y) = sum_t [log P(y_t | y_<t, X) - diversity_penalty count_g(t, y_t)]  /  divisor(|Y|)

count_g(t, v) is the number of beams of the groups before g that continue with token v at step t. The groups
take their steps one after another; each is a beam search of num_beams / num_beam_groups beams, and the best
texts of all groups are returned. Vijayakumar et al. 2018 (Diverse beam search), section 4, with Hamming
diversity.

A finished group (`BeamConfig.early_stopping`) no longer takes part; an input leaves the batch when all its
groups are finished.
"""

import torch
from torch import Tensor

from polyformer.models.generation.beam_search import (
    Beams,
    FinishedTexts,
    collect_finished,
    num_extensions,
    padded_result,
    reorder_state,
)
from polyformer.models.generation.config import BeamConfig
from polyformer.models.generation.decoder import Decoder, DecodingStart, DecodingState
from polyformer.models.generation.processors import process
from polyformer.models.generation.results import SearchResult
from polyformer.models.generation.search import SearchSettings


class BeamGroup:
    """A group of beams of all active inputs: its beams and finished texts, and which inputs it
    has finished.
    """

    def __init__(
        self, start: DecodingStart[DecodingState], rules: SearchSettings, config: BeamConfig, wanted: int
    ):
        inputs, self.device = len(start.logits), start.logits.device
        self.rules, self.config, self.size = rules, config, config.num_beams // config.num_beam_groups
        self.dtype = torch.promote_types(start.logits.dtype, torch.float32)
        self.owners = [FinishedTexts(config, wanted, rules.max_new_tokens) for _ in range(inputs)]
        zeros = torch.zeros(inputs, 1, dtype=self.dtype, device=self.device)
        self.beams = Beams(zeros, start.history.new_empty(inputs, 1, 0))
        self.finished = torch.zeros(inputs, dtype=torch.bool, device=self.device)

    def step(self, logits: Tensor, history: Tensor, counts: Tensor, length: int) -> Tensor:
        """Extend the beams by the logits [R K, V]; add its tokens to `counts` [R, V] for later groups.

        Returns the parent beam [R, size] of each beam.
        """
        rules, last = self.rules, length == self.rules.max_new_tokens
        width = self.beams.scores.shape[1]
        log_probabilities = logits.log_softmax(-1, dtype=self.dtype)
        if rules.processors:
            texts = torch.cat([history.repeat_interleave(width, 0), self.beams.tokens.flatten(0, 1)], 1)
            log_probabilities = process(rules.processors, log_probabilities, texts)
        penalty = self.config.diversity_penalty * counts.repeat_interleave(width, 0)
        candidates, parents = self.beams.extended(
            log_probabilities - penalty, num_extensions(rules, self.size)
        )
        ended = rules.stopping.ended(candidates.tokens.flatten(0, 1)).view_as(parents)
        active = ~self.finished.unsqueeze(1)
        collect_finished(self.owners, candidates, (ended | last) & active, self.size, last)
        self.beams, chosen = candidates.without(ended, self.size)
        continuing = (self.beams.scores.isfinite() & active).to(counts.dtype)
        counts.scatter_add_(1, self.beams.tokens[..., -1], continuing)
        self._mark_finished(length)
        return parents.gather(1, chosen)

    def _mark_finished(self, length: int) -> None:
        best = self.beams.scores[:, 0].tolist()
        now = [owner.is_done(score, length) for owner, score in zip(self.owners, best)]
        self.finished = self.finished | torch.tensor(now, dtype=torch.bool, device=self.device)

    def keep(self, rows: list[int], index: Tensor) -> None:
        """Keep only these inputs, given both as numbers and as an index tensor."""
        self.beams = Beams(self.beams.scores[index], self.beams.tokens[index])
        self.owners, self.finished = [self.owners[row] for row in rows], self.finished[index]


def group_beam_search(
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
    state, history = start.state, start.history
    logits = start.logits.unsqueeze(1).expand(-1, len(groups), -1)  # [R, groups * beams, V]
    for length in range(1, rules.max_new_tokens + 1):
        rows, beams = len(history), logits.shape[1] // len(groups)
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
