"""The grid of a study: axes with labels and their changes, and axes that list the values of one setting."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from polyformer.core.config import decode
from polyformer.core.errors import InputError, quote
from polyformer.training.recipes import Recipe

GENERATE = "generate"
"""The key of an axis with labels that a function returns."""

MEASURE, PREPARE = "measure", "prepare"
"""Sections of a change that do not belong to the recipe."""

SECTIONS = (*(field.name for field in dataclasses.fields(Recipe)), MEASURE, PREPARE)
"""What the name of a setting starts with."""


def with_written_labels(data: dict[str, Any], texts_of_file: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a study's file with the labels of its grids as texts.

    Args:
        data: the content, in which the label 3e-3 is the number 0.003.
        texts_of_file: the same content in the same order, in which every scalar is a text as in the file.
    """
    result = dict(data)
    if "grid" in data:
        result["grid"] = _labelled(data["grid"], texts_of_file["grid"])
    if isinstance(quick := data.get("quick"), dict) and "grid" in quick:
        result["quick"] = {**quick, "grid": _labelled(quick["grid"], texts_of_file["quick"]["grid"])}
    return result


def _labelled(grid: object, texts_of_file: Any) -> object:
    if not isinstance(grid, dict):
        return grid
    axes = {}
    for axis, levels in grid.items():
        texts = texts_of_file.get(str(axis), levels)
        axes[axis] = levels
        if isinstance(levels, dict) and GENERATE not in levels:
            axes[axis] = dict(zip(map(str, texts), levels.values()))
        elif isinstance(levels, list) and _are_values(levels):
            axes[axis] = _levels(axis, levels, [*map(str, texts)])
    return axes


def checked_grid(grid: object) -> dict[str, Any]:
    """Return a grid with labels and changes on every axis.

    Raises:
        InputError: an axis has neither labels with their changes nor values of the setting that it names.
    """
    axes = decode(dict[str, Any], grid, "grid")
    return {axis: _checked_axis(axis, levels) for axis, levels in axes.items()}


def _checked_axis(axis: object, levels: Any) -> dict[Any, Any]:
    if isinstance(levels, list) and _are_values(levels):
        levels = _levels(axis, levels, [*map(str, levels)])
    if not isinstance(levels, dict) or not levels:
        raise InputError(
            f"grid.{axis}: expected labels with their changes, or the values of a setting that the axis "
            f"names, as in optimizer.lr: [1e-3, 3e-3]; got {quote(levels)}"
        )
    for label, changes in {} if GENERATE in levels else levels.items():
        if not isinstance(changes or {}, dict) or not all(isinstance(name, str) for name in changes or ()):
            raise InputError(
                f"grid.{axis}.{label}: expected settings by their dotted names, as in "
                f"{{model.block: post}}, got {quote(changes)}"
            )
    return levels


def _are_values(levels: list[Any]) -> bool:
    """Return whether a list is not empty and has only numbers, texts, truth values and nulls."""
    return bool(levels) and all(isinstance(value, str | int | float | None) for value in levels)


def _levels(axis: object, values: list[Any], labels: list[str]) -> dict[str, Any]:
    """Return the labels of an axis that is named like a setting, each with the value of the setting.

    Raises:
        InputError: no setting has the name of the axis, or two values have the same label.
    """
    if str(axis).partition(".")[0] not in SECTIONS:
        raise InputError(
            f"grid.{axis}: a list has the values of the setting that its axis names, as in "
            f"optimizer.lr: [1e-3, 3e-3]; no setting starts with {quote(axis)}, so write labels with "
            f"changes, as in {{{labels[0]}: {{optimizer.lr: {labels[0]}}}}}"
        )
    if len({*labels}) < len(labels):
        raise InputError(f"grid.{axis}: expected different values, got {quote(values)}")
    return {label: {str(axis): value} for label, value in zip(labels, values)}


def same_label(wanted: object, known: Iterable[str]) -> str | None:
    """Return the label in `known` that an expression means: the same text, or the same number.

    In an expression 3e-3 is a number, and the label of the grid the text "3e-3". None if no label fits.
    """
    labels = list(known)
    if str(wanted) in labels:
        return str(wanted)
    if isinstance(wanted, int | float):
        return next((label for label in labels if _number(label) == wanted), None)
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
