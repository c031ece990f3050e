"""`polyformer convert --evaluate`: compare the models before and after the conversion."""

import dataclasses
from pathlib import Path

from annotated_types import Le

from polyformer.cli.commands.before_after import compare, comparison_table, quality_losses, text_reader
from polyformer.core.errors import InputError, quote
from polyformer.core.limits import SIZE
from polyformer.core.ranges import check_range
from polyformer.data.compressed_files import opened
from polyformer.data.tokenizer import Tokenizer
from polyformer.data.tokenizer_loading import load_tokenizer
from polyformer.models.architectures import Transformer

LONGEST = 4096
"""Largest default length of the pieces of text."""

CHARACTERS = 32
"""Characters of the text to read per required token."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation of the checkpoint in `folder` on the file `text`, with the command's options."""

    folder: str
    text: str
    lengths: str | None
    tokens: int
    tolerance: float

    def check(self, model: Transformer) -> None:
        """Raise `InputError` for invalid options before anything is written."""
        if not Path(self.text).is_file():
            raise InputError(f"--evaluate: {self.text}: no such file")
        tokenizer = load_tokenizer(self.folder)
        text_reader(model, tokenizer)
        lengths = self.resolved_lengths(model)
        if self.lengths is not None and (count := len(self._ids(tokenizer, lengths))) <= lengths[-1]:
            raise InputError(
                f"--lengths: {self.text} has {count} tokens, too few for a length of {lengths[-1]}; use a "
                "longer text or smaller lengths"
            )

    def show(self, before: Transformer, after: Transformer) -> None:
        """Print the comparison; exit with status 1 if the quality loss exceeds the tolerance."""
        lengths, tokenizer = self.resolved_lengths(before, after), load_tokenizer(self.folder)
        ids = self._ids(tokenizer, lengths)
        if self.lengths is None:  # limited by the length of the text
            lengths = [length for length in lengths if length < len(ids)] or lengths[:1]
        rows = list(compare(before, after, tokenizer, ids, lengths, self.tokens))
        print("\n".join(["", f"{self.text}, before -> after:", *comparison_table(rows)]))
        faults = quality_losses(rows, self.tolerance)
        if faults:
            print(
                f"quality lost: {'; '.join(faults)} (--tolerance {self.tolerance:g}); train the model further"
            )
            raise SystemExit(1)
        print(f"quality kept: all changes are within --tolerance {self.tolerance:g}")

    def _ids(self, tokenizer: Tokenizer, lengths: list[int]) -> list[int]:
        """Return the required tokens of the text, or all of them if there are fewer."""
        with opened(Path(self.text)) as file:
            return tokenizer.encode(file.read(CHARACTERS * max(self.tokens, *lengths)))

    def resolved_lengths(self, *models: Transformer) -> list[int]:
        """Return the lengths in tokens: --lengths, or the number of positions of each model."""
        if self.lengths is None:
            return sorted({min(model.config.max_position_embeddings, LONGEST) for model in models})
        parts = [part.strip() for part in self.lengths.split(",")]
        if not all(part.isdecimal() and int(part) > 1 for part in parts):
            raise InputError(
                f"--lengths: expected numbers above 1, for example 512,2048, got {quote(self.lengths)}"
            )
        for part in parts:
            check_range("--lengths", int(part), Le(SIZE))
        return sorted({int(part) for part in parts})
