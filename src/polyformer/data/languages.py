"""The languages of M2M-100; their tokens `__en__`, ... follow the vocabulary in this order.

Fan et al.: Beyond English-Centric Multilingual Machine Translation, 2020. The second list belongs to its
successor for WMT 2021 (Tran et al.).
"""

from polyformer.core.errors import unknown
from polyformer.data.hub_files import HubFiles

LANGUAGES = {
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he "
        "hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no "
        "ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo "
        "zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}


def language_tokens(files: HubFiles) -> list[str]:
    """Return the languages' tokens in the order of their ids."""
    name = files.settings.get("language_codes", "m2m100")
    if name not in LANGUAGES:
        raise unknown("language_codes", name, LANGUAGES)
    return [language_token(code) for code in LANGUAGES[name].split()]


def language_token(code: str) -> str:
    """Return M2M-100's token of a language."""
    return f"__{code}__"
