"""Numbers hidden in a text: the share that a decoder finds at one length."""

from polyformer.applications.probing import ProbeConfig, ProbedModel, ProbeText, probe
from polyformer.core.errors import InputError
from polyformer.data.tokenizers.tokenizer import Tokenizer
from polyformer.models.architectures import Transformer

NEW_TOKENS = 32
"""Tokens in which the number must be found, so that a comparison takes minutes."""


def recall(
    tokenizer: Tokenizer, text: ProbeText, samples: int, model: Transformer, length: int
) -> float | None:
    """Return the share of numbers that a decoder finds, each hidden in a prompt of `length` tokens of `text`.

    None for a length that is too long for the model or too short for the prompt.
    """
    config = ProbeConfig(samples=samples, max_new_tokens=NEW_TOKENS)
    try:
        (result,) = probe(probed(model, tokenizer), ["niah_single_2"], [length], text, config)
    except InputError:
        return None
    return result.score


def probed(model: Transformer, tokenizer: Tokenizer) -> ProbedModel:
    """Return the view of a decoder that reads prompts with the first token of its training."""
    begin = list[int]()
    if model.config.origin is None and tokenizer.backend.post_processor is None:
        begin = [token for token in (tokenizer.bos_id,) if token is not None]  # as the task lm
    return ProbedModel.of(model, tokenizer, lambda prompt: [*begin, *tokenizer.encode_prompt(prompt)])
