"""Contrastive search: likely tokens with a hidden state that is not too similar to the text so far.

    x_t = argmax over the k most likely v of  (1 - alpha) p(v | x_<t) - alpha max_{j < t} cos(h_v, h_j)

h_v is the model's last hidden state after reading v, and h_j the last hidden states of the text so far,
including the prompt (for an encoder-decoder, with a separate source text, of its output). Every step reads
the k candidates of each text in one pass. Su et al. 2022 (A contrastive framework for neural text
generation), section 4.2.

p is the model's distribution after the processors; tokens that they forbid are never chosen.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.models.generation.config import ContrastiveConfig
from polyformer.models.generation.decoder import Decoder, DecodingStart, DecodingState
from polyformer.models.generation.processors import process
from polyformer.models.generation.results import SearchResult
from polyformer.models.generation.search import GrowingTexts, SearchSettings, distribution


def contrastive_search(
    decoder: Decoder, start: DecodingStart[DecodingState], rules: SearchSettings, config: ContrastiveConfig
) -> SearchResult:
    """Generate one text for every input. A finished row leaves the batch."""
    logits, state, count = start.logits, start.state, min(config.candidates, start.logits.shape[1])
    texts = GrowingTexts(start.history, rules, logits.dtype)
    past = F.normalize(decoder.hidden, dim=-1).masked_fill((start.history < 0).unsqueeze(2), torch.nan)
    while True:
        probabilities = distribution(process(rules.processors, logits, texts.tokens))
        confidence, candidates = probabilities.topk(count)  # [N, k]
        # One pass reads the candidates of all texts: [N k].
        copies = torch.arange(len(logits), device=logits.device).repeat_interleave(count)
        following, looked = decoder.step(candidates.flatten(), state.reorder(copies))
        hidden = F.normalize(decoder.hidden, dim=-1).view(len(logits), count, -1)
        choice = contrast(confidence, hidden, past, config.penalty_alpha).argmax(1, keepdim=True)
        stay = texts.add(candidates.gather(1, choice).squeeze(1), logits)
        if stay is None:
            return texts.result()
        # The rows of the chosen candidates that are read already.
        rows = (choice.squeeze(1) + count * torch.arange(len(logits), device=logits.device))[stay]
        past = torch.cat([past[stay], hidden.flatten(0, 1)[rows].unsqueeze(1)], 1)
        logits, state = following[rows], looked.reorder(rows)


def contrast(confidence: Tensor, hidden: Tensor, past: Tensor, alpha: float) -> Tensor:
    """Return the values [N, k] of candidates of these probabilities [N, k] and directions [N, k, E].

    past: [N, T, E], the directions of the text so far, NaN at padding. The value is -inf for probability 0.
    """
    likeness = torch.einsum("nke,nte->nkt", hidden, past).nan_to_num(-torch.inf).amax(2)
    value = (1 - alpha) * confidence - alpha * likeness
    return value.masked_fill(confidence == 0, -torch.inf)
