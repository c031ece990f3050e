"""Data options for a source that is read like the data of a run: the same columns, in its own format."""

from typing import Any

from polyformer.data import DataConfig
from polyformer.data.formats.guess import guess_reading
from polyformer.training.recipes.recipe import merged, with_data


def for_another_source(
    config: DataConfig, path: str, changes: dict[str, Any], kind: str
) -> tuple[DataConfig, list[str]]:
    """Return the data options of a run for the source `path`, and a line for each guess in them.

    config: the options of the run. changes: options that the user sets. kind: the kind of the task.
    The names of columns stay those of the run, unless the source has a heading of its own.
    """
    before = config.to_dict()
    data = {name: value for name, value in with_data(before, path).items() if value is not None}
    if data["path"] == path:
        data = {name: value for name, value in data.items() if name not in ("split", "validation", "test")}
    data = merged(data, changes)
    if data["path"] != path:  # a folder with the files that the run's options name
        return DataConfig.from_dict(data, "data"), []
    header = None if "header" in changes else before.get("header")
    if header is not None:
        data.pop("header", None)
    guessed = guess_reading(path, data, kind, header)
    columns = {**guessed.data.pop("columns", {}), **(data.get("columns") or {})}
    data = {**data, **guessed.data, "columns": columns}
    return DataConfig.from_dict(data, "data"), guessed.said
