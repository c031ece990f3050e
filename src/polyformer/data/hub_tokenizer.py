"""The tokenizer in a checkpoint's directory, with the same ids as in transformers.

tokenizer.json is used if it exists. Otherwise the family, selected by the tokenizer's class or the model's
type, builds the pipeline from the older files. Otherwise the pipeline is built from the vocabulary files.
"""

from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, processors

from polyformer.core.errors import InputError, quote
from polyformer.core.gguf import gguf_file
from polyformer.data.gguf_tokenizer import load_gguf
from polyformer.data.hub_families import FAMILIES, PIECE_FILES, Family
from polyformer.data.hub_files import HubFiles, refuse_pickle
from polyformer.data.languages import language_token
from polyformer.data.pipelines import load_bpe, load_json, load_wordpiece, reading
from polyformer.data.sentencepiece import pipeline, read_pieces
from polyformer.data.special_tokens import ROLES
from polyformer.data.tokenizer import Tokenizer
from polyformer.data.word_bpe import WORD_FAMILIES, load_words

_NAMES = {
    "bert": "BertTokenizer DistilBertTokenizer ElectraTokenizer MobileBertTokenizer "
    "bert distilbert electra mobilebert",
    "gpt2": "GPT2Tokenizer gpt2 gpt_neo gptj",
    "roberta": "RobertaTokenizer BartTokenizer LongformerTokenizer LEDTokenizer roberta bart longformer led",
    "deberta": "DebertaTokenizer deberta",
    "openai-gpt": "OpenAIGPTTokenizer openai-gpt",
    "ctrl": "CTRLTokenizer ctrl",
    "xlm": "XLMTokenizer xlm",
    "t5": "T5Tokenizer MT5Tokenizer t5 mt5",
    "xlm-roberta": "XLMRobertaTokenizer xlm-roberta",
    "albert": "AlbertTokenizer albert",
    "m2m_100": "M2M100Tokenizer m2m_100",
    "big_bird": "BigBirdTokenizer big_bird",
    "deberta-v2": "DebertaV2Tokenizer deberta-v2",
    "reformer": "ReformerTokenizer reformer",
    "transfo-xl": "TransfoXLTokenizer transfo-xl",
}
FAMILY_OF = {name: family for family, names in _NAMES.items() for name in names.split()}
"""Families by classes of tokenizers and types of models."""
_NEUTRAL = ("PreTrainedTokenizer", "TokenizersBackend")  # uninformative: tokenizer.json is complete
_PICKLES = ("vocab.pkl", "vocab.bin", "tokenizer.pkl")


def load(path: Path, *, merges: Path | None = None, lowercase: bool | None = None) -> Tokenizer:
    """Load the tokenizer in a directory, in a GGUF file, or in another single file."""
    if not path.exists():
        raise InputError(
            f"{path}: no such tokenizer; expected a tokenizer.json, a vocab.txt or a directory with one"
        )
    file = None if (path / "tokenizer.json").is_file() else gguf_file(path)
    if file is not None:
        return load_gguf(file)
    if path.is_dir() and merges is None:
        overrides = {} if lowercase is None else {"do_lower_case": lowercase}
        with reading(path):
            return load_directory(HubFiles(path, overrides))
    path = path / "vocab.json" if path.is_dir() else path
    refuse_pickle(path)
    if path.suffix == ".txt":
        return Tokenizer(load_wordpiece(path, lowercase))
    if path.suffix == ".model":
        return Tokenizer(pipeline(read_pieces(path)))
    if merges is not None or path.name == "vocab.json":
        return Tokenizer(load_bpe(path, merges or path.with_name("merges.txt")))
    return Tokenizer(load_json(path))


def load_directory(files: HubFiles) -> Tokenizer:
    """Load the tokenizer of a directory; raises `InputError` if it has none or a damaged file."""
    name = next((FAMILY_OF[name] for name in files.names if name in FAMILY_OF), None)
    if (files.folder / "tokenizer.json").is_file():
        backend = load_json(files.file("tokenizer.json", needed_by="a tokenizer"))
        neutral = files.settings.get("tokenizer_class", "").removesuffix("Fast") in _NEUTRAL
        return _complete(files, backend, None if neutral else FAMILIES.get(name or ""), built=False)
    if name in WORD_FAMILIES:
        return load_words(files, name)
    if name is not None:
        return _complete(files, FAMILIES[name].build(files), FAMILIES[name], built=True)
    return _from_vocabulary(files)


def _from_vocabulary(files: HubFiles) -> Tokenizer:
    """Build a tokenizer of an unknown family from the vocabulary files only."""
    for name in ("vocab.txt", "vocab.json", *PIECE_FILES):
        path = files.folder / name
        if path.is_file():
            refuse_pickle(path)
            _refuse_unknown(files)
            if name == "vocab.txt":
                backend = load_wordpiece(path, files.settings.get("do_lower_case"))
                return _complete(files, backend, FAMILIES["bert"], built=False)
            if name == "vocab.json":
                return _complete(files, load_bpe(path, path.with_name("merges.txt")), None, built=False)
            return _complete(files, pipeline(read_pieces(path)), None, built=False)
    for name in _PICKLES:
        if (files.folder / name).is_file():
            refuse_pickle(files.folder / name)
    raise InputError(
        f"{files.folder}: no tokenizer in this directory; expected one of tokenizer.json, vocab.txt, "
        f"vocab.json, {', '.join(PIECE_FILES)} in it"
    )


def _refuse_unknown(files: HubFiles) -> None:
    name = files.settings.get("tokenizer_class", _NEUTRAL[0]).removesuffix("Fast")
    if name not in _NEUTRAL:
        raise InputError(
            f"{files.folder}: tokenizer_class {name} is not known; save it by transformers as tokenizer.json"
        )


def _complete(
    files: HubFiles, backend: tokenizers.Tokenizer, family: Family | None, *, built: bool
) -> Tokenizer:
    """Add the special tokens and the template from the files, or otherwise from the family."""
    roles = _roles(files, backend, family, built)
    plain = [*(family.extra(files) if family and built else [])]
    extra = [AddedToken(name, special=True, normalized=False) for name in plain]
    by_id = [files.by_id[number] for number in sorted(files.by_id)]
    named = [token for role in ROLES if (token := roles.get(role))]
    _add(backend, [*extra, *by_id, *named, *files.extra])
    for number, token in files.by_id.items():
        if backend.token_to_id(token.content) != number:
            raise InputError(
                f"{files.folder}: {quote(token.content)} should have the id {number}, but its files give "
                f"{backend.token_to_id(token.content)}"
            )
    contents = {role: token and token.content for role, token in roles.items()}
    if family and (built or backend.post_processor is None):
        language = language_token(files.settings.get("src_lang") or "en")
        _mark(backend, family, {**contents, "language": language})
    return Tokenizer(backend, roles=contents)


def _roles(
    files: HubFiles, backend: tokenizers.Tokenizer, family: Family | None, built: bool
) -> dict[str, AddedToken | None]:
    usual = dict(family.roles) if family else {}
    if not built:  # a complete file has all tokens
        usual = {role: name for role, name in usual.items() if backend.token_to_id(name) is not None}
    known = {token.content: token for token in files.by_id.values()}
    tokens = {
        role: known.get(name) or AddedToken(name, special=True, normalized=False)
        for role, name in usual.items()
    }
    return {**tokens, **files.roles}


def _add(backend: tokenizers.Tokenizer, tokens: list[AddedToken]) -> None:
    """Add the tokens that are not added yet; tokens in the vocabulary keep their ids."""
    there = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in tokens:
        if token.content not in there:
            there.add(token.content)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _mark(backend: tokenizers.Tokenizer, family: Family, names: Mapping[str, str | None]) -> None:
    """Set the family's template for encoding for a model, unless one of its tokens is missing."""
    there = {role: name for role, name in names.items() if name and backend.token_to_id(name) is not None}
    try:
        single, pair = (text.format(**there) for text in family.template)
    except KeyError:
        return
    used = {name for role, name in there.items() if f"{{{role}}}" in "".join(family.template)}
    ids = [(name, backend.token_to_id(name)) for name in sorted(used)]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
