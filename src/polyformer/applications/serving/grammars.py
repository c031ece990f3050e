"""Replies that are JSON by a schema: `response_format` of a chat, by masks of the next token.

A grammar of the schema follows the text so far. Before each token of the row it forbids what no continuation
allows, so that a text that ends is valid by construction:

    logits_v = -infinity    unless some text of the grammar begins with the text so far and the token v

Only the logits of this row change. llguidance compiles the schema and computes the masks, with limits of its
own for large grammars. Keywords that it does not know are refused by name, never left out. Between the parts
of the JSON there is one space, as json.dumps writes it, since small models can repeat white space for ever.
"""

import functools
import json
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.applications.serving.rows import Job, Reason, Row
from polyformer.core.errors import InputError
from polyformer.core.imports import needs_extra
from polyformer.data import Tokenizer
from polyformer.models.generation.processors import process

SCHEMA_BYTES = 2**16
"""The largest schema, as JSON."""

OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
"""Options of llguidance that a schema cannot change."""


class Grammar:
    """A compiled schema, for any number of texts."""

    def __init__(self, tokenizer: Any, source: str):
        self.tokenizer, self.source = tokenizer, source

    def matcher(self) -> Any:
        """Return the state of the grammar before the first token."""
        from llguidance import LLMatcher

        return LLMatcher(self.tokenizer, self.source, log_level=0)


class Grammars:
    """Compiles schemas for the tokens of a model with a table of `size` rows."""

    def __init__(self, tokenizer: Tokenizer, size: int):
        self.tokenizer, self.size, self.lock = tokenizer, size, threading.Lock()
        self.of_tokens = functools.lru_cache(maxsize=8)(self._tokens)

    def of_schema(self, schema: dict[str, Any], eos: tuple[int, ...]) -> Grammar:
        """Return the grammar of a JSON schema, for texts that end at one of the tokens `eos`.

        Raises `InputError` for schemas that are not valid, not supported, too large or fulfilled by no text.
        """
        with needs_extra("serve", "response_format: needs llguidance"):
            from llguidance import LLMatcher
        with self.lock:  # a second request waits for the table instead of making another
            tokens = self.of_tokens(eos)
        try:
            text = json.dumps(schema, allow_nan=False)
            if len(text) > SCHEMA_BYTES:
                raise ValueError(f"expected at most {SCHEMA_BYTES:,} characters, got {len(text):,}")
            source = LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS)
            fault = LLMatcher.validate_grammar(source, tokens)
        except (ValueError, RecursionError) as error:
            raise refused(str(error)) from error
        if fault:
            raise refused(fault)
        grammar = Grammar(tokens, source)
        first = grammar.matcher()
        first.compute_bitmask()
        if first.is_error() or first.is_stopped():
            raise refused("no text fulfils it")
        return grammar

    def _tokens(self, eos: tuple[int, ...]) -> Any:
        """Return the tokens of the tokenizer with their bytes; raise `InputError` where these are unknown."""
        from llguidance import LLTokenizer

        table = self.tokenizer.backend.to_str()
        try:
            return LLTokenizer(table, n_vocab=self.size, eos_token=[*eos] or None)
        except ValueError as error:
            message = (
                f"response_format: not supported with the tokenizer of this model ({error}); leave it out"
            )
            raise InputError(message) from error


def refused(why: str) -> InputError:
    """Return the error for a schema; only the beginning of a long reason, which repeats the schema."""
    short = why.splitlines()[0] if why else "not valid"
    if short.startswith("Resource "):
        short = "it refers to another document, which is not read"
    return InputError(f"response_format: the schema is refused: {short[:300]}; change the schema")


class ConstrainedRow(Row):
    """A growing text that a grammar allows; arguments as in `Row`, with a grammar in the job."""

    def __init__(self, job: Job, *others: Any):
        super().__init__(job, *others)
        self.matcher = job.grammar.matcher()

    @property
    def plain(self) -> bool:
        return False

    def next_token(self, logits: Tensor) -> int:
        """Return the next token by its logits [1, V], among those that the grammar allows.

        Settings may exclude all of them, as a least length excludes the end; then only the grammar counts.
        Raises `InputError` for a grammar that becomes too complex.
        """
        bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self.matcher.is_error():
            raise InputError("response_format: the schema became too complex for this text; simplify it")
        allowed = torch.from_numpy(bits[: logits.shape[1]].astype(bool)).to(logits.device)
        masked = logits.masked_fill(~allowed, -torch.inf)
        shaped = process(self.processors, masked, self.text[:, : self.length])
        token = int(self.choose(masked if bool(shaped.amax() == -torch.inf) else shaped))
        self.matcher.consume_token(token)
        return token

    def reason_after(self, token: int) -> Reason | None:
        """Return why the text ends after a token: also where nothing can follow in the grammar."""
        return "stop" if self.matcher.is_stopped() else super().reason_after(token)
