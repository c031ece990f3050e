"""A checkpoint for the commands: inference of a task with a trained model, without a recipe.

The tokenizer defines the special tokens of a text (`encode_for_model`), config.json the names of the labels.
For a polyformer model with a tokenizer without special tokens, texts get the tokens of the polyformer tasks.

A `Writer` is a checkpoint that generates text, by its generation settings, overridden by the command line.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polyformer.core.errors import InputError, quote, unknown
from polyformer.data import Collate, Tokenizer
from polyformer.data.rows.structured import encode_marked, marked_windows
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.pretrained import label_names
from polyformer.models.checkpoints import config_of, from_pretrained
from polyformer.models.config import ModelConfig, max_positions
from polyformer.models.generation import BeamConfig, GenerationConfig
from polyformer.models.generation.hub_format import from_hub
from polyformer.nn.heads import ClassifyConfig
from polyformer.training.tasks.questions import (
    QuestionAnsweringConfig,
    answers,
    choice_probabilities,
    pack_choices,
)
from polyformer.training.tasks.seq2seq import EXTRA_TOKENS
from polyformer.training.tasks.text import Continuation, batched, required

COMMANDS = {"choose": "choose", "classify": "classify", "tag": "tag", "span": "answer"}
"""The command for each head; for a language model it depends on the stacks."""

KINDS = {"answer": "qa", "generate": "lm"}
"""The kind of task if its name differs from the command."""

MARKS = {"generate": ("{bos} $A", "{bos} $A $B"), "translate": ("$A {eos}", "$A $B {eos}")}
LABELLED = "{cls} $A {sep}", "{cls} $A {sep} $B:1 {sep}:1"
"""Input format of models of the polyformer tasks, for a single text and for two texts."""


class Reader:
    """The `model` in `folder` and its `tokenizer`, for the command `wanted`.

    Raises `InputError` for a model with another head, and without a tokenizer.
    """

    batch_tokens = 4096

    def __init__(self, folder: Path, wanted: str, device: torch.device):
        config = config_of(folder)
        check_head(folder, config, wanted)
        self.folder, self.tokenizer = folder, load_tokenizer(folder)
        if config.origin is None and self.tokenizer.backend.post_processor is None:
            set_special_tokens(self.tokenizer, *MARKS.get(wanted, LABELLED))
        self.model = from_pretrained(folder).to(device)
        self.config, self.fields = config, config.origin.fields if config.origin else {}
        self.language: str | None = None  # language of the texts
        self.collate, self.first = collation(config, self.tokenizer)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels by their numbers; LABEL_0, ... without names."""
        return label_names(self.model)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text with special tokens; raise `InputError` for too long texts."""
        encoded = self.tokenizer.encode_batch_for_model(texts, language=self.language)
        return [self.checked(text, ids) for text, (ids, _) in zip(texts, encoded)]

    def _encode_pairs(self, texts: Sequence[str], pairs: Sequence[str]) -> list[dict[str, list[int]]]:
        encoded = self.tokenizer.encode_batch_for_model(texts, pairs, language=self.language)
        typed = self.config.embedding.type_vocab_size > 1
        return [
            {"input_ids": self.checked(text, ids), **({"token_type_ids": types} if typed else {})}
            for text, (ids, types) in zip(texts, encoded)
        ]

    def checked(self, text: str, ids: list[int]) -> list[int]:
        """Return the ids of a text if the model supports the length; an empty text gets a single token."""
        limit = max_positions(self.config)
        if limit is not None and len(ids) > limit:
            raise InputError(
                f"text ({quote(text)}) has {len(ids)} tokens, and {self.folder} takes {limit}; shorten it, "
                f"or make a model for more by polyformer convert {self.folder} OUT --max-positions {len(ids)}"
            )
        return ids or [self.first]

    @torch.no_grad()
    def classify(
        self, model: Transformer, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, float]]:
        """Return the probability of each label for every text or pair; for regression, the values."""
        head = self.config.head
        assert isinstance(head, ClassifyConfig)
        labels, scores = self.labels, [{}] * len(texts)
        rows: Sequence[Any] = self.encode(texts) if pairs is None else self._encode_pairs(texts, pairs)
        for chosen, batch in batched(model, rows, self.collate, self.batch_tokens):
            shares = model(**batch).logits
            if head.problem == "multi_label":
                shares = shares.sigmoid()
            elif head.problem != "regression" and len(labels) > 1:
                shares = shares.softmax(-1)
            for i, share in zip(chosen, shares.tolist()):
                scores[i] = dict(zip(labels, share))
        return scores

    def choose(self, model: Transformer, questions: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        """Return the probability of each choice for every {text, choices}."""
        texts = [(question["text"], question["choices"]) for question in questions]
        pad = self.collate.pad_id
        rows = [
            pack_choices(self._encode_pairs([text] * len(choices), choices), pad) for text, choices in texts
        ]
        return choice_probabilities(model, rows, pad, self.batch_tokens)

    @torch.no_grad()
    def tag(self, model: Transformer, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return the tag of every word of every sentence: the tag of its first token.

        A word without tokens gets the tag of the first token of the sentence.
        """
        texts, labels = [" ".join(words) for words in sentences], self.labels
        encoded = encode_marked(self.tokenizer, texts)
        rows = [self.checked(text, encoding.ids) for text, encoding in zip(texts, encoded)]
        tags: list[list[str]] = [[]] * len(sentences)
        for chosen, batch in batched(model, rows, self.collate, self.batch_tokens):
            for i, guess in zip(chosen, model(**batch).logits.argmax(-1).tolist()):
                places = first_token_indices(sentences[i], encoded[i].offsets)
                tags[i] = [labels[guess[place]] for place in places]
        return tags

    def answer(self, model: Transformer, rows: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the answer to the question of each row, a span of its context, which is read in windows."""
        usual, typed = QuestionAnsweringConfig(), self.config.embedding.type_vocab_size > 1
        length = min(usual.max_length, max_positions(self.config) or usual.max_length)
        questions, contexts = ([row[name] for row in rows] for name in ("question", "context"))
        encoded = []
        for pair in encode_marked(self.tokenizer, questions, contexts):
            windows = marked_windows(pair, length=length, stride=usual.stride, typed=typed)
            encoded.append(
                (windows, [offset for offset, side in zip(pair.offsets, pair.sequence_ids) if side == 1])
            )
        return answers(model, [dict(row) for row in rows], encoded, usual, self.collate)


def command_of(config: ModelConfig) -> str | None:
    """Return the command for the head of a model, or None."""
    if config.head.kind in ("language_model", "adaptive_softmax") and config.decoder is not None:
        return "generate" if config.encoder is None else "translate"
    if config.head.kind == "language_model" and config.special.mask is not None:  # masked diffusion
        return "generate"
    return COMMANDS.get(config.head.kind)


def check_head(folder: Path, config: object, wanted: str) -> None:
    """Raise `InputError` for a model that does not support the command `wanted`."""
    if not isinstance(config, ModelConfig):
        raise InputError(f"{folder}: not a model of texts")
    command = command_of(config)
    if command != wanted:
        way = (
            f"use polyformer {command}"
            if command
            else (
                f"train one from it by polyformer train --pretrained {folder} "
                f"--task.kind {KINDS.get(wanted, wanted)}"
            )
        )
        raise InputError(f"{folder}: its head is {quote(config.head.kind)}, which cannot {wanted}; {way}")


def collation(config: ModelConfig, tokenizer: Tokenizer) -> tuple[Collate, int]:
    """Return the collation with the model's padding, and the token used for a text without tokens."""
    special = config.special
    pads, firsts = (special.pad, tokenizer.pad_id, 0), (tokenizer.bos_id, special.bos, special.eos, 0)
    pad, first = (next(token for token in tokens if token is not None) for tokens in (pads, firsts))
    return Collate(pad), first


def set_special_tokens(tokenizer: Tokenizer, single: str, pair: str) -> None:
    """Set the special tokens that `tokenizer` adds to texts for a model, given by their roles."""
    from tokenizers import processors

    roles = [role for role in ("bos", "eos", "cls", "sep") if f"{{{role}}}" in single]
    ids = {role: required(getattr(tokenizer, f"{role}_id"), f"<{role}>") for role in roles}
    names = {role: tokenizer.token(number) for role, number in ids.items()}
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=single.format(**names),
        pair=pair.format(**names),
        special_tokens=[(names[role], ids[role]) for role in roles],
    )


def first_token_indices(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the index of the first token of each of the words, which are joined by single spaces.

    A token may include the space before its word; a word without tokens gets 0. `offsets` are the characters
    of the tokens, empty for special tokens.
    """
    places, start = [], 0
    for word in words:
        stop = start + len(word)
        places.append(next((i for i, (a, b) in enumerate(offsets) if a < stop and b >= start and b > a), 0))
        start = stop + 1
    return places


LENGTHS = "max_length", "max_new_tokens"


class Writer(Reader, Continuation):
    """A reader for generation. `rules`: generation settings as on the hub; `prefix`: starts every text.

    Old checkpoints have these settings in config.json.
    """

    def __init__(self, folder: Path, wanted: str, device: torch.device):
        super().__init__(folder, wanted, device)
        described = {**self.fields, "architectures": None}  # marks it as the content of a config.json
        self.rules: dict[str, Any] = dict(self.model.generation or described)
        self.prefix = ""

    def follow(self, **options: Any) -> None:
        """Override the generation settings of the checkpoint by `options`."""
        if options.get("do_sample"):
            self.rules |= {"num_beams": 1, "top_k": self.rules.get("top_k", 0)}
        elif options.get("num_beams", 1) > 1:
            self.rules["do_sample"] = False
        elif options.get("penalty_alpha"):
            self.rules |= {"do_sample": False, "num_beams": 1}
        self.rules |= options

    def settings(self, most: int) -> GenerationConfig:
        """Return the generation settings, with at most `most` new tokens by default."""
        limited = any(self.rules.get(name) is not None for name in LENGTHS)
        return from_hub(self.rules if limited else {**self.rules, "max_new_tokens": most})

    def start(self, prompt: str) -> list[int]:
        return self.checked(prompt, self.tokenizer.encode_prompt(prompt))

    def drawing(self) -> torch.Generator | None:
        """Return a generator for sampling, or None if the settings do not sample.

        The default generator of torch starts with the same seed in every process.
        """
        if self.settings(EXTRA_TOKENS).method != "sample":
            return None
        generator = torch.Generator(next(self.model.parameters()).device)
        generator.seed()
        return generator

    def between(self, source: str | None, target: str | None) -> None:
        """Set the languages of a translation: tokens of the tokenizer, or a task in config.json."""
        known, tasks = self.tokenizer.languages, self.fields.get("task_specific_params") or {}
        task = tasks.get(f"translation_{source}_to_{target}")
        if known:
            for name, language in (("source", source), ("target", target)):
                if language is not None and language not in known:
                    raise unknown(f"--{name}-language", language, known)
            if target is not None:
                self.rules["forced_bos_token_id"] = known[target]
            elif self.rules.get("forced_bos_token_id") is None:
                raise InputError(
                    "--target-language: this model writes many languages; expected one of them, "
                    "such as " + ", ".join(list(known)[:8])
                )
            self.language = source
        elif task is not None:
            self.rules |= task
            self.prefix = self.rules.pop("prefix", "")
        elif source or target:
            names = [name.removeprefix("translation_") for name in tasks if name.startswith("translation_")]
            way = f"expected one of {', '.join(names)}" if names else "leave them out"
            raise InputError(f"--source-language, --target-language: {self.folder} knows none such; {way}")

    def translate(
        self, model: Transformer, texts: Sequence[str], beam: BeamConfig | None = None
    ) -> list[str]:
        """Return the generated text for each text.

        Without a limit in the checkpoint, the output has at most `EXTRA_TOKENS` tokens more than the longest
        text of a batch.
        """
        if beam is not None:
            self.follow(num_beams=beam.num_beams)
        rows, continuations = self.encode([self.prefix + text for text in texts]), [""] * len(texts)
        generator = self.drawing()
        most = self.batch_tokens // self.settings(EXTRA_TOKENS).beam.num_beams
        for chosen, batch in batched(model, rows, self.collate, most):
            config = self.settings(batch["input_ids"].shape[1] + EXTRA_TOKENS)
            generated = model.generate(
                batch["input_ids"],
                batch["attention_mask"],
                config,
                None,
                self.tokenizer.decode,
                generator=generator,
            )
            several = generated.texts(self.tokenizer.decode, config.stop)
            for i, text in zip(chosen, several[:: config.num_return_sequences]):
                continuations[i] = text.strip()
        return continuations
