"""Families of checkpoints: each converts its tokenizer's files to a pipeline, special tokens and a template.

The template is the input of the family's models: "{cls} $A {sep}" for one text, and for two "{cls} $A {sep}
$B:1 {sep}:1" (:1 gives token type 1; tokens are named by their roles). Where transformers 5 differs from a
checkpoint's training, the training format is used: one [SEP] between DeBERTa's texts (as its authors
requested in transformers' pull request 10703), and SentencePiece's own spaces and character table for
BigBird, DeBERTa v2 and Reformer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from polyformer.core.errors import InputError
from polyformer.data.hub_files import HubFiles
from polyformer.data.languages import language_tokens
from polyformer.data.pipelines import read_bpe, read_vocab, read_wordpiece, without_capitals, wordpiece
from polyformer.data.sentencepiece import NORMAL, pipeline, read_pieces

PIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model", "spm_char.model")
"""Usual file names of SentencePiece models in checkpoints."""


class Template(NamedTuple):
    """The special tokens around one text and around two, in the template language of `tokenizers`."""

    single: str
    pair: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of tokenizers: `build` makes the pipeline; `roles` are the default special tokens."""

    build: Callable[[HubFiles], tokenizers.Tokenizer]
    roles: Mapping[str, str]
    template: Template = Template("$A", "$A $B")
    extra: Callable[[HubFiles], list[str]] = lambda files: []


def _bert(files: HubFiles) -> tokenizers.Tokenizer:
    setting = files.settings.get
    role = files.roles.get("unk")
    unknown = role.content if role else "[UNK]"
    vocab = read_wordpiece(files.file("vocab.txt", needed_by="a WordPiece tokenizer"), unknown)
    backend = wordpiece(setting("do_lower_case", without_capitals(vocab)), vocab, unknown)
    backend.normalizer.handle_chinese_chars = setting("tokenize_chinese_chars", True)
    backend.normalizer.strip_accents = setting("strip_accents")
    return backend


def _bytelevel(files: HubFiles) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(_bpe(files))
    prefix = files.settings.get("add_prefix_space", False)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    return backend


def _gpt(files: HubFiles) -> tokenizers.Tokenizer:
    """Build GPT's BPE of lower-case words; the last piece of a word ends in </w>."""
    backend = tokenizers.Tokenizer(_bpe(files, unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return backend


def _bpe(files: HubFiles, **options: str) -> models.BPE:
    vocab = files.file("vocab.json", needed_by="a BPE tokenizer")
    return read_bpe(vocab, files.folder / "merges.txt", **options)


def _words(files: HubFiles) -> tokenizers.Tokenizer:
    """Build a tokenizer of words between spaces, as in WikiText-103.

    Other texts are not split into such words here. The vocabularies of Transformer-XL are mostly pickles,
    which are refused; vocab.txt has a word per line.
    """
    path = files.file("vocab.txt", "vocab.bin", "vocab.pkl", needed_by="a tokenizer of words")
    words = [line.split()[0] for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    if "<unk>" not in words:
        raise InputError(f"{path}: no <unk> in it, which words outside the vocabulary become")
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if files.settings.get("lower_case"):
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def _pieces(files: HubFiles) -> tokenizers.Tokenizer:
    return pipeline(read_pieces(_piece_file(files)))


def _piece_file(files: HubFiles) -> Path:
    return files.file(*PIECE_FILES, needed_by="a SentencePiece tokenizer")


def _t5(files: HubFiles) -> tokenizers.Tokenizer:
    """Build the pieces, followed by the sentinels from the last to the first."""
    pieces = read_pieces(_piece_file(files))
    return pipeline(pieces.reordered([*pieces.names, *reversed(_sentinels(files))]), by_words=True)


def _sentinels(files: HubFiles) -> list[str]:
    return [f"<extra_id_{i}>" for i in range(files.settings.get("extra_ids", 100))]


def _xlm_roberta(files: HubFiles) -> tokenizers.Tokenizer:
    """Build fairseq's ids: four special tokens, the pieces from the model's fourth on, <mask>."""
    pieces = read_pieces(_piece_file(files))
    names = ["<s>", "<pad>", "</s>", "<unk>", *pieces.names[3:], "<mask>"]
    return pipeline(pieces.reordered(names), by_words=True)


def _albert(files: HubFiles) -> tokenizers.Tokenizer:
    """Build ALBERT's pipeline: plain quotes, no accents and capitals; a comma never joins a number."""
    pieces = read_pieces(_piece_file(files))
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not files.settings.get("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if files.settings.get("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    rated = zip(pieces.names, pieces.scores, pieces.kinds)
    joined = {name: score - 100 for name, score, kind in rated if kind == NORMAL and _number_comma(name)}
    return pipeline(pieces, before=steps, by_words=True, table=joined)


def _number_comma(piece: str) -> bool:
    return len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit()


def _m2m(files: HubFiles) -> tokenizers.Tokenizer:
    """Build pieces segmented by the model and numbered by vocab.json; pieces without an id are not used."""
    path = files.file("vocab.json", needed_by="an M2M-100 tokenizer")
    vocab = read_vocab(path)
    pieces = read_pieces(_piece_file(files))
    if pieces.unknown not in vocab:
        raise InputError(f"{path}: no {pieces.unknown} in it, which the model beside it needs")
    return pipeline(pieces.reordered(list(vocab)))


def _deberta_v2(files: HubFiles) -> tokenizers.Tokenizer:
    lower = [normalizers.Lowercase()] if files.settings.get("do_lower_case", False) else []
    breaks = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC()]
    backend = pipeline(read_pieces(_piece_file(files)), before=[*lower, *breaks])
    if files.settings.get("split_by_punct", False):
        isolate = pre_tokenizers.Punctuation(behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([isolate, backend.pre_tokenizer])
    return backend


_BRACKETS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_ANGLES = {
    "bos": "<s>",
    "eos": "</s>",
    "unk": "<unk>",
    "sep": "</s>",
    "pad": "<pad>",
    "cls": "<s>",
    "mask": "<mask>",
}
_LANGUAGES = {role: token for role, token in _ANGLES.items() if role not in ("cls", "mask")}
_TYPED = Template("{cls} $A {sep}", "{cls} $A {sep} $B:1 {sep}:1")
_DOUBLE = Template("{cls} $A {sep}", "{cls} $A {sep} {sep} $B {sep}")
_ENDS = Template("$A {eos}", "$A {eos} $B {eos}")
_SPOKEN = Template("{language} $A {eos}", "{language} $A $B {eos}")
_END = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>"}
_BOTH = {"bos": "[CLS]", "eos": "[SEP]"}

FAMILIES = {
    "bert": Family(build=_bert, roles=_BRACKETS, template=_TYPED),
    "gpt2": Family(build=_bytelevel, roles=_END),
    "roberta": Family(build=_bytelevel, roles=_ANGLES, template=_DOUBLE),
    "deberta": Family(build=_bytelevel, roles={**_BOTH, **_BRACKETS}, template=_TYPED),
    "openai-gpt": Family(build=_gpt, roles={"unk": "<unk>"}),
    "t5": Family(
        build=_t5, roles={"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}, extra=_sentinels, template=_ENDS
    ),
    "xlm-roberta": Family(build=_xlm_roberta, roles=_ANGLES, template=_DOUBLE),
    "albert": Family(
        build=_albert, roles={**_BOTH, **_BRACKETS, "unk": "<unk>", "pad": "<pad>"}, template=_TYPED
    ),
    "m2m_100": Family(build=_m2m, roles=_LANGUAGES, extra=language_tokens, template=_SPOKEN),
    "big_bird": Family(
        build=_pieces, roles={**_ANGLES, "sep": "[SEP]", "cls": "[CLS]", "mask": "[MASK]"}, template=_TYPED
    ),
    "deberta-v2": Family(build=_deberta_v2, roles={**_BOTH, **_BRACKETS}, template=_TYPED),
    "reformer": Family(build=_pieces, roles={"eos": "</s>", "unk": "<unk>"}),
    "transfo-xl": Family(build=_words, roles={"eos": "<eos>", "unk": "<unk>"}),
}
