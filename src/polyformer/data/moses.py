"""Words of XLM: Moses' normalization and tokenization for English, lower case and without accents.

Punctuation of other scripts becomes ASCII, as in Moses' replace-unicode-punctuation; non-printing characters
are removed. English rules apply to every language, which is the default of transformers too.
"""

import re
import unicodedata
from functools import cache
from typing import Any

from polyformer.core.errors import InputError

_FROM = (
    "\uff0c\u3001\u201d\u201c\u2236\uff1a\uff1f\u300a\u300b\uff09\uff01\uff08\uff1b\u300d\u300c"
    "\uff5e\u2019\u2501"
)
_TO = ',,""::?"")!(;""~\'-'
_BRACKETS = dict(zip("\u3008\u3009\u3010\u3011\uff05\u2026", ("<", ">", "[", "]", "%", "...")))
_DIGITS = {chr(0xFF10 + digit): str(digit) for digit in range(10)}
_PLAIN = str.maketrans({**dict(zip(_FROM, _TO)), **_BRACKETS, **_DIGITS})
_STOPS = re.compile("[\u3002\uff0e]\\s*")


def moses_words(text: str, lowered: bool) -> list[str]:
    """Return the words of a text; `lowered` means lower case and without accents."""
    normalizer, tokenizer = _moses()
    text = normalizer.normalize(_STOPS.sub(". ", text).translate(_PLAIN))
    text = "".join(character for character in text if not unicodedata.category(character).startswith("C"))
    words = tokenizer.tokenize(text, return_str=False, escape=False)
    if not lowered:
        return [word for word in words if word]
    apart = unicodedata.normalize("NFD", " ".join(words).lower())
    bare = "".join(character for character in apart if unicodedata.category(character) != "Mn").lower()
    return [word for word in bare.split(" ") if word]


@cache
def _moses() -> tuple[Any, Any]:
    try:
        import sacremoses
    except ImportError as error:
        raise InputError(
            "XLM's tokenizer needs the package sacremoses; pip install 'polyformer[moses]'"
        ) from error
    return sacremoses.MosesPunctNormalizer(lang="en"), sacremoses.MosesTokenizer(lang="en")
