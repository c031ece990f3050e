"""Generated answers, by greedy decoding up to a stop text."""

from collections.abc import Sequence

import torch

from polyformer.applications.prompting.scoring import BATCH_TOKENS
from polyformer.data import by_tokens
from polyformer.models.architectures import Transformer
from polyformer.models.generation import Decode, GenerationConfig


def write_answers(
    model: Transformer,
    prompts: Sequence[list[int]],
    decode: Decode,
    *,
    stop: str,
    max_new_tokens: int,
    batch_tokens: int = BATCH_TOKENS,
) -> list[str]:
    """Return the text generated after each of the `prompts` (token ids), without surrounding white space."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, stop=(stop,) if stop else ())
    device, pad = next(model.parameters()).device, model.config.special.pad or 0
    answers = [""] * len(prompts)
    lengths = torch.tensor([[len(prompt) + max_new_tokens] for prompt in prompts]).numpy()
    for numbers in by_tokens(lengths, None, max_tokens=max(batch_tokens, int(lengths.max()))):
        batch = [prompts[number] for number in numbers]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch], device=device)
        real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        generated = model.generate(ids, real.to(device), config, None, decode)
        for number, text in zip(numbers, generated.texts(decode, config.stop)):
            answers[number] = text.strip()
    return answers
