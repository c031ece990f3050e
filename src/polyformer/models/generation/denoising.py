"""Generation with masked diffusion models: new tokens begin as masks, and each pass turns some into tokens.

    x = prompt, L masks
    for each block of masks, from left to right:
        for each of its passes, while r are left:
            y_i = a token drawn from p_i, the model's distribution at each mask i of the block, or its argmax
            of the m masks, the ceil(m / r) with the highest confidence become y_i; the others stay masks

    remasking      confidence of mask i
    "confidence"   p_i(y_i)
    "entropy"      sum_v p_i(v) log p_i(v)
    "random"       a random number: all orders are equally likely, as in the process that training inverts

A pass can write several tokens, and ignores how they depend on one another. With one pass for each token,
"random" and sampling, texts are drawn from the model's any-order distribution. The mask itself is never
drawn. Nie et al. 2025 (LLaDA), section 2.4 and algorithms 4 and 5; Sahoo et al. 2024 (MDLM), section 4.

`WholeText` reads prompt, tokens and masks of all blocks in every pass: with one block this is LLaDA's
generation, with several its semi-autoregressive form. `FinishedBlocks` is for the attention `BlockDiffusion`,
in which no token sees a later block: a pass reads the current block only, and the keys and values of finished
blocks are in a cache. Arriola et al. 2025 (BD3-LM), section 3.2.

A text ends with its first end token; what blocks behind it contain is dropped.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import BlockDiffusion
from polyformer.core.errors import InputError
from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs
from polyformer.models.generation.config import DenoisingConfig, GenerationConfig
from polyformer.models.generation.constraints import Processor
from polyformer.models.generation.decoder import check_batch, check_finite, check_prompt
from polyformer.models.generation.processors import process
from polyformer.models.generation.results import SearchResult, Stopping
from polyformer.models.outputs import ModelState

Block = tuple[int, int]
"""The tokens start <= i < stop of a text."""


class BlockReader(Protocol):
    """The model in a generation by blocks."""

    def blocks(self, prompt: int, length: int) -> list[Block]:
        """Return the blocks of new tokens, of a text of `length` tokens that begins with a prompt."""
        ...

    def logits(self, text: Tensor, block: Block) -> Tensor:
        """Return the logits [N, stop - start, V] of a block of the text [N, T], with masks."""
        ...

    def finish(self, text: Tensor, block: Block) -> None:
        """Read a block without masks, after which the next block begins."""
        ...


class WholeText:
    """A model that reads the whole text in every pass. padding: [N], of the prompts; None for none."""

    def __init__(self, model: Any, size: int | None, padding: Tensor | None):
        self.model, self.size, self.padding = model, size, padding

    def blocks(self, prompt: int, length: int) -> list[Block]:
        """Return blocks of `size` tokens after the prompt, or one block."""
        return cut(prompt, length, range(prompt, length, self.size or length))

    def logits(self, text: Tensor, block: Block) -> Tensor:
        """Return the logits of the block, from the prompt and all blocks."""
        mask = None
        if self.padding is not None:
            places = torch.arange(text.shape[1], device=text.device)
            mask = (places >= self.padding.unsqueeze(1)).long()
        return self.model.logits_at(self.model(text, mask), slice(*block))

    def finish(self, text: Tensor, block: Block) -> None:
        """Do nothing: the next pass reads the block again."""


class FinishedBlocks:
    """A model with attention by blocks, and the keys and values of the blocks before the current one."""

    def __init__(self, model: Any, size: int, length: int):
        self.model, self.size, self.read = model, size, 0
        self.runner = model.runner("encoder")
        stack = self.runner.stack
        self.state = ModelState(NO_TOKENS, stack.new_states(length), owner=stack.owner)

    def blocks(self, prompt: int, length: int) -> list[Block]:
        """Return the model's blocks of `size` positions; the first of them may begin with the prompt."""
        return cut(prompt, length, range(0, length, self.size))

    def logits(self, text: Tensor, block: Block) -> Tensor:
        """Return the logits of the block, after the finished blocks in the cache."""
        start, stop = block
        first = start - start % self.size
        if self.read < first:  # the finished blocks of the prompt
            self.finish(text, (self.read, first))
        hidden, state = self.runner.following(ModelInputs(text[:, first:stop]), self.state)
        # The masks of the block are not part of the state: their slots are written again.
        self.state = state.truncated_(stop - first)
        return self.model.predictions(hidden[:, start - first :])

    def finish(self, text: Tensor, block: Block) -> None:
        """Add the keys and values of the block to the cache."""
        stop = block[1]
        if stop % self.size == 0:
            _, self.state = self.runner.following(ModelInputs(text[:, self.read : stop]), self.state)
            self.read = stop


def cut(prompt: int, length: int, starts: Sequence[int]) -> list[Block]:
    """Return the parts after the prompt of runs that begin at `starts` and end at the next one."""
    edges = sorted({prompt, length, *(start for start in starts if prompt < start < length)})
    return [*itertools.pairwise(edges)]


def block_size(config: Any) -> int | None:
    """Return the size of the blocks of a model's attention; None for attention in both directions."""
    mechanism = config.encoder.attention.mechanism
    if isinstance(mechanism, SoftmaxConfig) and isinstance(mechanism.pattern, BlockDiffusion):
        return mechanism.pattern.size
    return None


Confidence = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities [N, T, V] and the chosen tokens' [N, T] to the confidence [N, T]."""


def confidence(rule: str, generator: torch.Generator | None) -> Confidence:
    """Return the confidence of a rule of the module's docstring."""
    if rule == "entropy":
        return lambda log_p, own: (log_p.exp() * log_p).nansum(-1)  # 0 log 0 counts as 0
    if rule == "random":
        return lambda log_p, own: torch.rand(own.shape, generator=generator, device=own.device)
    return lambda log_p, own: own


@dataclasses.dataclass(frozen=True, eq=False)
class DenoisingRules:
    """Settings of all passes.

    new: the number of new tokens. steps: passes for all of them. mask: the mask token. pad: fills texts
    behind their end. choose: a token for each row of processed logits.
    """

    new: int
    steps: int
    mask: int
    pad: int
    processors: Sequence[Processor]
    choose: Callable[[Tensor], Tensor]
    confidence: Confidence
    stopping: Stopping
    streamer: Callable[[Tensor], None] | None = None

    def shares(self, blocks: Sequence[Block]) -> Iterator[tuple[Block, int]]:
        """Yield each block and its passes: at least 1, in proportion to its tokens.

        Raises `InputError` for fewer passes than blocks, and for more than new tokens.
        """
        if not len(blocks) <= self.steps <= self.new:
            raise InputError(
                f"denoising_steps: expected {len(blocks)} to {self.new}, one or more for each block and at "
                f"most one for each new token, got {self.steps}"
            )
        done, used = 0, 0
        for number, (start, stop) in enumerate(blocks, 1):
            done += stop - start
            # Later blocks need a pass each too.
            due = min(round(self.steps * done / self.new), self.steps - (len(blocks) - number))
            share = min(max(1, due - used), stop - start)
            used += share
            yield (start, stop), share


def denoise(
    reader: BlockReader, prompt: Tensor, rules: DenoisingRules, inputs: Sequence[int]
) -> SearchResult:
    """Return `rules.new` tokens after each prompt [N, T]. inputs: the index of the input of each row."""
    count, width = prompt.shape
    text = torch.cat([prompt, prompt.new_full((count, rules.new), rules.mask)], 1)
    scores = torch.zeros(count, rules.new, device=prompt.device)
    lengths = torch.full((count,), rules.new, device=prompt.device)
    done = torch.zeros(count, dtype=torch.bool, device=prompt.device)
    blocks = reader.blocks(width, text.shape[1])
    for (start, stop), steps in rules.shares(blocks):
        write_block(reader, text, scores[:, start - width : stop - width], (start, stop), steps, rules)
        ended = first_end(text[:, width:stop], rules.stopping, inputs)
        lengths = torch.where(done, lengths, ended.clamp_max(rules.new))
        stream(rules, text[:, start:stop], lengths - (start - width))
        done = done | (ended <= stop - width)
        if stop == text.shape[1] or bool(done.all()):
            break
        reader.finish(text, (start, stop))
    inside = torch.arange(rules.new, device=prompt.device) < lengths.unsqueeze(1)
    tokens = text[:, width:].masked_fill(~inside, rules.pad)
    return SearchResult(tokens, lengths, (scores * inside).sum(1))


def write_block(
    reader: BlockReader, text: Tensor, scores: Tensor, block: Block, steps: int, rules: DenoisingRules
) -> None:
    """Replace the masks of a block of the text [N, T] by tokens, in this many passes.

    scores: [N, stop - start], which get the log-probability of each token in the pass that wrote it.
    """
    own = text[:, slice(*block)]
    masked = torch.ones_like(own, dtype=torch.bool)
    left = own.shape[1]
    for remaining in range(steps, 0, -1):
        logits = reader.logits(text, block).float()
        check_finite(logits)
        logits[..., rules.mask] = -torch.inf
        log_p = logits.log_softmax(-1)
        chosen = rules.choose(process(rules.processors, logits.flatten(0, 1), text)).view_as(own)
        values = log_p.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        count = -(-left // remaining)
        ranked = rules.confidence(log_p, values).masked_fill(~masked, -torch.inf)
        kept = torch.zeros_like(masked).scatter(1, ranked.topk(count).indices, True)
        own[kept], scores[kept] = chosen[kept], values[kept].to(scores.dtype)
        masked &= ~kept
        left -= count


def first_end(text: Tensor, stopping: Stopping, inputs: Sequence[int]) -> Tensor:
    """Return the number of tokens [N] up to the end of each new text [N, T]; a large number without one."""
    width = text.shape[1]
    places = torch.arange(1, width + 1, device=text.device).expand_as(text)
    is_end = torch.isin(text, torch.tensor(stopping.eos, device=text.device, dtype=text.dtype))
    first = places.masked_fill(~is_end, torch.iinfo(torch.long).max).amin(1)
    if not stopping.strings:
        return first
    stopped = dataclasses.replace(stopping, eos=()).ended(text, inputs)
    return torch.where(stopped, first.clamp_max(width), first)


def stream(rules: DenoisingRules, tokens: Tensor, lengths: Tensor) -> None:
    """Give the streamer the tokens [N, T] of a block one after another, the first `lengths` [N] of each."""
    if rules.streamer is None:
        return
    for place, column in enumerate(tokens.unbind(1)):
        active = lengths > place
        if not bool(active.any()):
            return
        rules.streamer(torch.where(active, column, rules.pad))


def denoised(
    model: Any,
    prompt: Tensor,
    padding: Tensor | None,
    config: DenoisingConfig,
    rules: DenoisingRules,
    inputs: Sequence[int],
) -> SearchResult:
    """Return the new tokens after each prompt [N, T].

    padding: [N], numbers of padding tokens before the prompts; None for none. inputs: the index of the input
    of each row. Raises `InputError` for a wrong number of passes.
    """
    size, length = block_size(model.config), prompt.shape[1] + rules.new
    if size is None:
        return denoise(WholeText(model, config.block_length, padding), prompt, rules, inputs)
    if padding is None or not bool(padding.any()):
        return denoise(FinishedBlocks(model, size, length), prompt, rules, inputs)
    # Blocks begin at the same positions of every text, thus at other columns of each row.
    rows = [
        denoise(FinishedBlocks(model, size, length), prompt[i : i + 1, skipped:], rules, inputs[i : i + 1])
        for i, skipped in enumerate(padding.tolist())
    ]
    fields = ([getattr(row, name) for row in rows] for name in ("tokens", "lengths", "scores"))
    return SearchResult(*map(torch.cat, fields))


def check_denoising(
    model: Any,
    config: GenerationConfig,
    others: Mapping[str, Any],
    prompt: tuple[Tensor, Tensor | None],
    new: int,
) -> None:
    """Raise `InputError` for settings and arguments that a masked diffusion model has no use for.

    others: further arguments of `generate`, None where not given. prompt: ids and attention mask. new: the
    number of new tokens.
    """
    plain, asked = GenerationConfig(), config.denoising
    names = ("beam", "contrastive", "dola", "speculation", "cache", "constraints", "repetition_penalty")
    used = [name for name in names if getattr(config, name) != getattr(plain, name)]
    used += ["min_new_tokens"] if config.min_new_tokens else []
    used += ["min_length"] if config.whole.min_length else []
    used += [name for name, value in others.items() if value is not None]
    if used:
        raise InputError(
            f"{used[0]}: a masked diffusion model writes its tokens in any order, which this does not fit; "
            "leave it out"
        )
    if asked.remasking == "random" and not config.sampling.do_sample:
        raise InputError("remasking: 'random' draws numbers; set do_sample, or use 'confidence'")
    size = block_size(model.config)
    if size is not None and asked.block_length not in (None, size):
        raise InputError(
            f"block_length: the model's attention has blocks of {size} tokens, got {asked.block_length}; "
            "leave it out"
        )
    check_batch(prompt[0])
    if not model.head.predicts_next:
        raise InputError("generate: needs a language-model head; this model predicts no tokens")
    check_prompt(*prompt, new, model.encoder.position.max_positions)
