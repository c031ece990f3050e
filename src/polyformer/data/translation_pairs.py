"""Translation pairs as one text, for masked modelling with access to the other language.

    input_ids     <b> x x x <e> <b> y y <e>
    position_ids   0  1 2 3  4   0  1 2  3      restarted in the second language
    langs          0  0 0 0  0   1  1 1  1      a language for every token

Source: Lample and Conneau 2019 (XLM), section 3.4 and figure 1.
"""

from collections.abc import Sequence

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.pairs import shares_of_capacity


def translation_row(
    source: Sequence[int],
    target: Sequence[int],
    *,
    begin_id: int,
    end_id: int,
    languages: tuple[int, int] = (0, 1),
    length: int | None = None,
) -> dict[str, np.ndarray]:
    """Return a row as above, int32 arrays of at most `length` tokens.

    The longer text is truncated at its end. `begin_id` and `end_id` enclose each of the two, in XLM both
    </s>. `languages` are the numbers of the two languages in the model's table.
    """
    if length is not None:
        if length < 6:
            raise InputError(f"length: expected 6 tokens or more, a token of each text in four, got {length}")
        kept = shares_of_capacity(len(source), len(target), length - 4)
        source, target = source[: kept[0]], target[: kept[1]]
    parts = [[begin_id, *ids, end_id] for ids in (source, target)]
    return {
        "input_ids": np.array([*parts[0], *parts[1]], np.int32),
        "position_ids": np.concatenate([np.arange(len(part), dtype=np.int32) for part in parts]),
        "langs": np.repeat(np.array(languages, np.int32), [len(part) for part in parts]),
    }
