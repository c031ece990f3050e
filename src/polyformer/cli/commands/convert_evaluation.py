"""What `polyformer convert --evaluate` measures, and what it prints."""

import dataclasses
from pathlib import Path

from polyformer.cli.commands.before_after import compare, lost, reading, table
from polyformer.core.errors import InputError, quote
from polyformer.core.limits import SIZE
from polyformer.core.sizes import check_most
from polyformer.data.compressed_files import opened
from polyformer.data.tokenizer import Tokenizer
from polyformer.data.tokenizer_loading import load_tokenizer
from polyformer.models.architectures import Transformer

LONGEST = 4096
"""Of the pieces of a text that are read unless lengths are named."""

CHARACTERS = 32
"""Characters that are read of a text for each token that is needed."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The checkpoint `folder`, whose tokenizer reads the file `text`, and the command's options."""

    folder: str
    text: str
    lengths: str | None
    tokens: int
    tolerance: float

    def check(self, model: Transformer) -> None:
        """Refuse what cannot be measured, before anything is written."""
        if not Path(self.text).is_file():
            raise InputError(f"--evaluate: {self.text}: no such file")
        if self.tolerance < 0:
            raise InputError(f"--tolerance: expected 0 or more, got {self.tolerance}")
        if self.tokens < 1:
            raise InputError(f"--tokens: expected 1 or more, got {self.tokens}")
        tokenizer = load_tokenizer(self.folder)
        reading(model, tokenizer)
        lengths = self.asked(model)
        if self.lengths is not None and (count := len(self._ids(tokenizer, lengths))) <= lengths[-1]:
            raise InputError(
                f"--lengths: {self.text} has {count} tokens, too few for a piece of {lengths[-1]}; name a "
                "longer text, or smaller lengths"
            )

    def show(self, before: Transformer, after: Transformer) -> None:
        """Print both models on the text, and whether the new one is good; if not, exit with status 1."""
        lengths, tokenizer = self.asked(before, after), load_tokenizer(self.folder)
        ids = self._ids(tokenizer, lengths)
        if self.lengths is None:  # as far as the text goes
            lengths = [length for length in lengths if length < len(ids)] or lengths[:1]
        rows = list(compare(before, after, tokenizer, ids, lengths, self.tokens))
        print("\n".join(["", f"{self.text}, before -> after:", *table(rows)]))
        faults = lost(rows, self.tolerance)
        if faults:
            print(f"not good: {'; '.join(faults)} (--tolerance {self.tolerance:g}); train it further")
            raise SystemExit(1)
        print(f"good: nothing is lost beyond {self.tolerance:g}")

    def _ids(self, tokenizer: Tokenizer, lengths: list[int]) -> list[int]:
        """Return as many tokens of the text as are needed, or all of it."""
        with opened(Path(self.text)) as file:
            return tokenizer.encode(file.read(CHARACTERS * max(self.tokens, *lengths)))

    def asked(self, *models: Transformer) -> list[int]:
        """The lengths that are named, else as many tokens as the models have positions."""
        if self.lengths is None:
            return sorted({min(model.config.max_position_embeddings, LONGEST) for model in models})
        parts = [part.strip() for part in self.lengths.split(",")]
        if not all(part.isdecimal() and int(part) > 1 for part in parts):
            raise InputError(f"--lengths: expected numbers above 1 as 512,2048, got {quote(self.lengths)}")
        for part in parts:
            check_most("--lengths", int(part), SIZE)
        return sorted({int(part) for part in parts})
