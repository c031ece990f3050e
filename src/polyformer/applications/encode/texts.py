"""The texts of several files in sequence, or a list of texts, each with an identifier."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.data import DataConfig
from polyformer.data.formats.columns import roles
from polyformer.data.formats.readers import Row
from polyformer.data.sources.checks import fingerprint
from polyformer.data.sources.origins import open_source


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Rows of `files` (source names as in `polyformer.data.sources.origins`), in order, read lazily.

    column: the column of the text; None: the column with a usual name, or the only column. id: the column of
    the identifier, texts or integers; None: rows are numbered from 0 across all files. format: of all files;
    None: inferred from their names, where a .txt has one text per line.
    """

    files: tuple[str, ...]
    column: str | None = None
    id: str | None = None
    format: str | None = None

    @property
    def name(self) -> str:
        """Return the name of the texts in messages."""
        return ", ".join(self.files)

    def rows(self) -> Iterator[tuple[int | str, str]]:
        """Yield the id and the text of every row; an `InputError` names the file and the row without them."""
        number, kind = 0, None
        for file in self.files:
            for row_number, row in enumerate(open_source(file, "train", self._format(file)), 1):
                where = f"{file}, row {row_number}"
                text = self._text(row, where)
                name = number if self.id is None else _value(row, self.id, where, "--id")
                if isinstance(name, bool) or not isinstance(name, int | str):
                    raise InputError(
                        f"{where}: --id {self.id}: expected a text or an integer, got {quote(name)}"
                    )
                kind = kind or type(name)
                if type(name) is not kind:
                    raise InputError(
                        f"{where}: --id {self.id}: {quote(name)} is of another type than in the rows before"
                    )
                yield name, text
                number += 1

    def fingerprint(self) -> dict[str, Any]:
        """Return plain data that describes the rows: equal for equal files that are read alike."""
        prints = [
            {name: about[name] for name in ("bytes", "sha256")}
            for file in self.files
            for about in fingerprint(DataConfig(path=file, format=self._format(file)), ("text",))["path"]  # type: ignore[arg-type]
        ]
        return {"files": prints, "column": self.column, "id": self.id, "format": self.format}

    def _format(self, file: str) -> str | None:
        plain = Path(file.removesuffix(".gz")).suffix.lower() == ".txt"
        return self.format or ("lines" if plain else None)

    def _text(self, row: Row, where: str) -> str:
        if self.column is not None:
            text = _value(row, self.column, where, "--column")
        else:
            known = roles(list(row), "lm")
            texts = [name for name, value in row.items() if isinstance(value, str) and name != self.id]
            names = [known[1]["text"]] if known else texts
            if len(names) != 1:
                raise InputError(
                    f"{where}: which of {', '.join(map(quote, row)) or 'no columns'} is the text? "
                    "Say it by --column NAME"
                )
            text = row[names[0]]
        if not isinstance(text, str):
            raise InputError(f"{where}: expected a text, got {quote(text)}")
        return text


@dataclass(frozen=True, kw_only=True)
class TextList:
    """Texts in memory, numbered from 0, such as those of standard input.

    name: the name of the texts in messages.
    """

    name: str
    texts: tuple[str, ...]

    def rows(self) -> Iterator[tuple[int, str]]:
        """Yield the number of every text and the text."""
        return iter(enumerate(self.texts))

    def fingerprint(self) -> dict[str, Any]:
        """Return plain data that describes the texts: equal for equal texts."""
        content = json.dumps(self.texts).encode()
        return {"texts": len(self.texts), "sha256": hashlib.sha256(content).hexdigest()}


def _value(row: Row, column: str, where: str, flag: str) -> Any:
    if column not in row:
        names = ", ".join(map(quote, row)) or "none"
        raise InputError(f"{where}: no column {quote(column)}, which {flag} names; it has {names}")
    return row[column]
