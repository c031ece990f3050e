"""The BPE of CTRL and of XLM: a text is split into words, and each word into marked pieces.

The `tokenizers` library cannot express them: XLM's words are Moses' words in lower case without accents, and
both vocabularies lack intermediate pieces of merges. So words are merged here, and their results are cached.

    CTRL   words end at white space and keep a line break; "foo@@ bar": @@ if the word continues
    XLM    words of the package `sacremoses`, English rules; "foo bar</w>": </w> at the end of a word
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models

from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write, write_json
from polyformer.data.hub_files import HubFiles
from polyformer.data.moses import moses_words
from polyformer.data.pipelines import read_vocab
from polyformer.data.special_tokens import ROLES
from polyformer.data.tokenizer import Tokenizer, check_texts

_REMEMBERED = 100_000  # words; then the cache is cleared


@dataclass(frozen=True, kw_only=True)
class WordFamily:
    """A family: `words` splits a text; `write` converts the pieces of a word to names in the vocabulary."""

    tokenizer_class: str
    words: Callable[[str, bool], list[str]]
    write: Callable[[Sequence[str]], list[str]]
    read: Callable[[Sequence[str]], str]
    header: int  # lines of merges.txt before the first merge
    roles: Mapping[str, str]
    extra: tuple[str, ...] = ()
    marked: bool = False  # "{bos} a {sep} b {sep}"


def _ctrl_write(pieces: Sequence[str]) -> list[str]:
    return [*(piece + "@@" for piece in pieces[:-1]), pieces[-1].removesuffix("</w>")]


WORD_FAMILIES = {
    "ctrl": WordFamily(
        tokenizer_class="CTRLTokenizer",
        words=lambda text, lowered: re.findall(r"\S+\n?", text),
        write=_ctrl_write,
        read=lambda tokens: " ".join(tokens).replace("@@ ", "").strip(),
        header=1,
        roles={"unk": "<unk>"},
    ),
    "xlm": WordFamily(
        tokenizer_class="XLMTokenizer",
        words=moses_words,
        write=list,
        read=lambda tokens: "".join(tokens).replace("</w>", " ").strip(),
        header=0,
        roles={
            "bos": "<s>",
            "sep": "</s>",
            "cls": "</s>",
            "pad": "<pad>",
            "unk": "<unk>",
            "mask": "<special1>",
        },
        extra=tuple(f"<special{i}>" for i in range(10)),
        marked=True,
    ),
}


def load_words(files: HubFiles, name: str) -> "WordBPE":
    """Load the tokenizer of vocab.json and merges.txt in the folder of a checkpoint."""
    vocab = read_vocab(files.file("vocab.json", needed_by=f"a tokenizer of {name}"))
    merges_file = files.folder / "merges.txt"
    if not merges_file.is_file():
        raise InputError(f"{merges_file}: no such file; a vocab.json needs the merges of its BPE beside it")
    family = WORD_FAMILIES[name]
    special = {role: token and token.content for role, token in files.roles.items()}
    roles = {**family.roles, **special}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=roles["unk"]))
    extra = [*family.extra, *(token.content for token in files.extra)]
    backend.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False)
            for name in dict.fromkeys([*(roles[role] for role in ROLES if roles.get(role)), *extra])
        ]
    )
    lines = merges_file.read_text(encoding="utf-8").split("\n")[family.header :]
    pairs = [tuple(line.split()[:2]) for line in lines if line.strip()]
    lowered = files.settings.get("do_lowercase_and_remove_accent", True)
    return WordBPE(backend, roles=roles, family=family, merges=pairs, lowered=lowered)


class WordBPE(Tokenizer):
    """A tokenizer of a `WordFamily`; its files are compatible with transformers' class of that name."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        roles: Mapping[str, str | None],
        family: WordFamily,
        merges: Sequence[tuple[str, ...]],
        lowered: bool,
    ):
        super().__init__(backend, roles=roles)
        self.family, self.merges, self.lowered = family, merges, lowered
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._vocab = backend.get_vocab(with_added_tokens=True)
        self._unknown = self._vocab[roles["unk"] or ""]
        self._known: dict[str, list[int]] = {}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, word by word."""
        check_texts(texts)
        return [self._plain(text) for text in texts]

    def encode_batch_for_model(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, language: str | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Return ids and token types with the family's special tokens around each text or pair."""
        if language is not None:
            raise self._no_languages(language)
        seconds = pairs if pairs is not None else [None] * len(texts)
        return [self._marked(text, second) for text, second in zip(texts, seconds, strict=True)]

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of the ids; pieces are joined where the vocabulary marks a continuation."""
        kept = [int(number) for number in ids if keep_special or int(number) not in self.special_ids]
        self._check_ids(ids)
        return self.family.read([self.token(number) for number in kept])

    def save(self, directory: str | Path) -> Path:
        """Write vocab.json, merges.txt and the files of special tokens; return the path of the first."""
        directory = Path(directory)
        vocab = self.backend.get_vocab(with_added_tokens=False)
        write_json(directory / "vocab.json", dict(sorted(vocab.items(), key=lambda item: item[1])))
        header = ["#version: 0.2"] * self.family.header
        lines = [*header, *(" ".join(pair) for pair in self.merges), ""]
        atomic_write(directory / "merges.txt", "\n".join(lines).encode())
        self._write_config(
            directory,
            tokenizer_class=self.family.tokenizer_class,
            do_lowercase_and_remove_accent=self.lowered,
        )
        return directory / "vocab.json"

    def _plain(self, text: str) -> list[int]:
        words = self.family.words(text, self.lowered)
        return [number for word in words for number in self._word(word)]

    def _word(self, word: str) -> list[int]:
        ids = self._known.get(word)
        if ids is None:
            pieces = self._merge((*word[:-1], word[-1] + "</w>"))
            ids = [self._vocab.get(name, self._unknown) for name in self.family.write(pieces)]
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[word] = ids
        return ids

    def _merge(self, symbols: tuple[str, ...]) -> tuple[str, ...]:
        """Merge all pairs of the best rank, from left to right, repeatedly."""
        while len(symbols) > 1:
            best = min(pairwise(symbols), key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            joined, i = [], 0
            while i < len(symbols):
                step = 2 if symbols[i : i + 2] == best else 1
                joined.append("".join(symbols[i : i + step]))
                i += step
            symbols = tuple(joined)
        return symbols

    def _marked(self, text: str, pair: str | None) -> tuple[list[int], list[int]]:
        check_texts([text] if pair is None else [text, pair])
        first = self._with_special(text)
        second = [] if pair is None else self._with_special(pair)
        if self.family.marked:
            start, end = (self._vocab[self.roles[role] or ""] for role in ("bos", "sep"))
            first, second = [start, *first, end], second if pair is None else [*second, end]
        return first + second, [0] * len(first) + [int(self.family.marked)] * len(second)

    def _with_special(self, text: str) -> list[int]:
        """Return the ids of a text, with names of special tokens recognized."""
        names = sorted((self.token(number) for number in self.special_ids), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
        special = set(names)
        return [
            number
            for part in parts
            for number in ([self._vocab[part]] if part in special else self._plain(part))
        ]
