"""Sentinel tokens that replace spans of a text: <extra_id_0>, <extra_id_1>, ... (Raffel et al. 2020).

As in T5's vocabulary they follow all other tokens, the first with the highest id.
"""

from polyformer.core.errors import InputError
from polyformer.data.tokenizer import Tokenizer

NAME = "<extra_id_{}>"


def add_sentinels(tokenizer: Tokenizer, count: int = 100) -> Tokenizer:
    """Return a tokenizer with at least `count` sentinels: `tokenizer` itself if it has them."""
    backend = tokenizer.backend
    missing = [name for name in map(NAME.format, range(count)) if backend.token_to_id(name) is None]
    if not missing:
        return tokenizer
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    backend.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in reversed(missing)]
    )
    return Tokenizer(backend, tokenizer.roles)


def sentinel_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """Return the ids of the first `count` sentinels, in order; raises `InputError` if there are fewer."""
    numbers = [tokenizer.backend.token_to_id(NAME.format(number)) for number in range(count)]
    ids = [number for number in numbers if number is not None]
    if len(ids) < count:
        raise InputError(
            f"tokenizer: expected {count} sentinels {NAME.format(0)}, {NAME.format(1)}, ..., got {len(ids)}; "
            "cut shorter rows, or train a tokenizer for this task; a checkpoint that has too few was not "
            "trained on spans: leave such parts out (form: spans)"
        )
    return ids
