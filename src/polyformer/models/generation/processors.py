"""Processors of the logits of the next token, and the choice of the largest of very many logits.

Large inputs are searched in blocks, as `topk` and `argmax` are slow for them.

`Dola` contrasts layers (Chuang et al. 2024, section 2): the log-probabilities of the last layer minus those
from an earlier layer.

    F(v) = log p_N(v) - log p_M(v)   where p_N(v) >= 0.1 max p_N, -inf elsewhere
    M    = argmax over candidate layers j of JSD(p_N || p_j)

p_j is the distribution of the model's final norm and head on the state before layer j, so that p_0 uses the
embedding sum, and p_N the output of the last layer. Tokens are drawn from softmax(F): its log-probabilities
replace the model's, in greedy search or sampling, and M is chosen separately for each token of each text.
"low" means every second layer of the lower half, "high" of the upper half; for deep models (above 40 layers)
of the first or last 20 layers, as in the paper. If the head is tied to the token table, the states before the
first two layers still mostly encode the token itself, so "low" excludes them.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.generation.config import GenerationConfig, SamplingConfig
from polyformer.models.generation.constraints import Processor, forbidden, forced, no_bad_words, no_repeat

# The size of a block, which has a fast maximum; and the least input length for which blocks pay off.
BLOCK, MIN_LENGTH = 128, 1 << 13


def blockwise_topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row of x [N, M], in order, and their indices: [N, count] each."""
    length = x.shape[1]
    blocks = length // BLOCK
    if length < MIN_LENGTH or blocks < count:
        values, index = x.topk(count)
        return values, index
    whole = x[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
    # The blocks with the largest maxima contain all of them; ascending, so that ties keep their order.
    chosen = whole.amax(2).topk(count).indices.sort().values
    some = whole.gather(1, chosen.unsqueeze(2).expand(-1, -1, BLOCK)).flatten(1)
    rest = x[:, blocks * BLOCK :]
    values, index = torch.cat([some, rest], 1).topk(count)
    inside = chosen.gather(1, (index // BLOCK).clamp_max(count - 1)) * BLOCK + index % BLOCK
    return values, torch.where(index < some.shape[1], inside, index - some.shape[1] + blocks * BLOCK)


def blockwise_argmax(logits: Tensor) -> Tensor:
    """Return the first token with the highest logit, [N] for [N, V]."""
    if logits.is_cpu and logits.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(logits.numpy().argmax(-1))  # 15 times as fast as torch's argmax
    length = logits.shape[1]
    blocks = length // BLOCK
    if length < MIN_LENGTH:
        return logits.argmax(-1)
    peaks = logits[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).amax(2)
    rest = logits[:, blocks * BLOCK :]
    if rest.shape[1]:
        peaks = torch.cat([peaks, rest.amax(1, keepdim=True)], 1)
    first = peaks.argmax(1, keepdim=True) * BLOCK
    inside = (first + torch.arange(BLOCK, device=logits.device)).clamp_max(length - 1)
    return first.squeeze(1) + logits.gather(1, inside).argmax(1)


def process(processors: Sequence[Processor], logits: Tensor, history: Tensor) -> Tensor:
    """Return `logits` after all `processors`, in their order."""
    for processor in processors:
        logits = processor(logits, history)
    return logits


def repetition_penalty(theta: float) -> Processor:
    """Divide positive logits of the history's tokens by `theta` and multiply negative ones.

    Keskar et al. 2019 (CTRL), section 4.1, in the form that also works below zero.
    """

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        tokens = torch.where(history < 0, history[:, -1:], history)  # instead of padding
        seen = logits.gather(1, tokens)
        return logits.scatter(1, tokens, torch.where(seen > 0, seen / theta, seen * theta))

    return apply


def temperature(value: float) -> Processor:
    """Divide the logits by `value`: below 1 sharpens the distribution, above 1 flattens it."""
    return lambda logits, history: logits / value


def top_k(count: int) -> Processor:
    """Keep only the `count` most likely tokens (and ties with the last of them)."""

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        least = logits.topk(min(count, logits.shape[1])).values[:, -1:]
        return logits.masked_fill(logits < least, -torch.inf)

    return apply


def top_p(mass: float) -> Processor:
    """Keep only the fewest most likely tokens of total probability `mass`. Holtzman et al. 2020, 3.1."""

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        ranked, order = logits.sort(descending=True)
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of all likelier tokens; exactly 0 for the first
        beyond = before >= mass
        return logits.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)

    return apply


def min_p(share: float) -> Processor:
    """Keep only tokens with at least `share` of the highest probability. Nguyen et al. 2024, section 3."""

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        probabilities = logits.softmax(-1)
        least = share * probabilities.amax(-1, keepdim=True)
        return logits.masked_fill(probabilities < least, -torch.inf)

    return apply


def typical_p(mass: float) -> Processor:
    """Keep only the fewest tokens with total probability `mass`, in order of the distance of -log p from its
    mean.

    Meister et al. 2023 (locally typical sampling), equation 9; ties with the last token are kept too.
    """

    def apply(logits: Tensor, history: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        entropy = -(log_p * log_p.exp()).nansum(-1, keepdim=True)  # 0 log 0 of a forbidden token counts as 0
        # |-log p - H|, equation 9.
        distance = (-log_p - entropy).abs()
        ranked, order = distance.sort()
        reached = log_p.exp().gather(1, order).cumsum(1)
        last = (reached < mass).sum(1, keepdim=True).clamp_max(logits.shape[1] - 1)
        return logits.masked_fill(distance > ranked.gather(1, last), -torch.inf)

    return apply


def sampling_processors(config: SamplingConfig) -> list[Processor]:
    """Return the processors that shape the distribution, in the order of the fields, for all options set."""
    chosen = [temperature(config.temperature)] if config.temperature != 1.0 else []
    chosen += [top_k(config.top_k)] if config.top_k is not None else []
    chosen += [top_p(config.top_p)] if config.top_p is not None and config.top_p < 1.0 else []
    chosen += [min_p(config.min_p)] if config.min_p is not None else []
    chosen += [typical_p(config.typical_p)] if config.typical_p is not None and config.typical_p < 1.0 else []
    return chosen


def processors(
    config: GenerationConfig, eos: tuple[int, ...], width: int, device: torch.device
) -> list[Processor]:
    """Return all processors of `config`, in transformers' order, for texts that begin with `width` tokens."""
    asked = config.constraints
    least, most = config.lengths(width)
    # As in transformers, an end token among the bad words is no error and has no effect.
    words = tuple(word for word in asked.bad_words_ids if not (len(word) == 1 and word[0] in eos))
    first = asked.forced_bos_token_id
    # After the forced token.
    begin = width + (width == 1 and first is not None)
    chosen = [repetition_penalty(config.repetition_penalty)] if config.repetition_penalty != 1.0 else []
    chosen += [no_repeat(asked.no_repeat_ngram_size)] if asked.no_repeat_ngram_size else []
    chosen += [no_bad_words(words, device)] if words else []
    chosen += [forbidden(eos, device, stop=width + least)] if eos and least > 0 else []
    chosen += [forced((first,), 1, device)] if first is not None and width == 1 else []
    if asked.forced_eos_token_id:
        chosen.append(forced(asked.forced_eos_token_id, width + most - 1, device))
    chosen += [forbidden(asked.suppress_tokens, device)] if asked.suppress_tokens else []
    if asked.begin_suppress_tokens:
        chosen.append(forbidden(asked.begin_suppress_tokens, device, begin, begin + 1))
    return chosen + sampling_processors(config.sampling)


# The least share of the highest probability that another token must have.
PLAUSIBLE = 0.1


def candidate_layers(
    layers: Literal["low", "high"] | tuple[int, ...], depth: int, tied: bool
) -> tuple[int, ...]:
    """Return the candidate layers of a model of `depth` layers.

    Raises `InputError` for layers that the model does not have.
    """
    first = 2 if tied and depth > 2 else 0
    if layers == "low":
        end = depth // 2 if depth <= 40 else 20
        return tuple(range(first, end, 2)) or (first,)
    if layers == "high":
        return tuple(range(depth // 2 if depth <= 40 else depth - 20, depth, 2))
    assert not isinstance(layers, str)
    for layer in layers:
        if layer >= depth:
            raise InputError(
                f"dola_layers: expected layers from 0 to {depth - 1}, before the last, got {layer}"
            )
    return tuple(sorted(set(layers)))


def contrasted(last: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """Return F as log-probabilities from the logits `last` [..., V] and those of the candidate layers."""
    final = last.log_softmax(-1)
    layers = torch.stack([logits.log_softmax(-1) for logits in earlier])  # [J, ..., V]
    if len(earlier) > 1:
        chosen = torch.stack([divergence(final, layer) for layer in layers]).argmax(0)
        index = chosen[None, ..., None].expand(1, *last.shape)
        # M differs between tokens.
        layers = layers.gather(0, index)
    # 0.1 max p, in log space.
    plausible = final >= final.amax(-1, keepdim=True) + torch.tensor(PLAUSIBLE, dtype=final.dtype).log()
    return (final - layers[0]).masked_fill(~plausible, -torch.inf).log_softmax(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence [...] of two distributions of log-probabilities [..., V]."""
    mean = torch.logaddexp(p, q) - torch.log(torch.tensor(2.0, dtype=p.dtype, device=p.device))
    return ((p.exp() * (p - mean)).nansum(-1) + (q.exp() * (q - mean)).nansum(-1)) / 2


# Hidden states [N, K, E] before the head to logits [N, K, V].
Predict = Callable[[Tensor], Tensor]


class Dola:
    """The contrast F, which replaces a model's logits.

    layers: the candidates. predict: the head. norm: the norm between the last layer and the head.
    """

    def __init__(self, layers: tuple[int, ...], predict: Predict, norm: Callable[[Tensor], Tensor]):
        self.layers, self.predict, self.norm = layers, predict, norm

    def __call__(self, logits: Tensor, hidden_states: Sequence[Tensor]) -> Tensor:
        """Return the contrasted logits of the last K tokens.

        logits: [N, K, V]. hidden_states: [N, T, E], before every layer and at the end.
        """
        count = logits.shape[1]
        earlier = [self.predict(self.norm(hidden_states[layer][:, -count:])) for layer in self.layers]
        return contrasted(logits, earlier)
