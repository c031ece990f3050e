"""Trajectories: recorded episodes, each with an observation, an action and a reward for every step.

A row is an episode: lists `observations`, `actions` and `rewards` of equal length. An observation is a number
or a list of numbers. So is an action; an action that is a single integer is a discrete choice.
"""

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import EXPANDED, EXPANSION

ROLES = ("observations", "actions", "rewards")
ENDS = ("terminals", "timeouts")
"""Arrays of a .npz file that are true at the last step of an episode."""


@dataclass(frozen=True, eq=False)
class Episodes:
    """Concatenated episodes, N steps in total.

    observations [N, S] and actions [N, A] in float32, or choices [N] in int64. returns [N]: undiscounted
    return-to-go of each step. starts [episodes + 1]: the first step of each episode, and N.
    """

    observations: np.ndarray
    actions: np.ndarray
    returns: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[Any]) -> "Episodes":
        """Return the episodes of `rows` from `checked_episodes`."""
        columns = list(zip(*([np.asarray(row[role]) for role in ROLES] for row in rows)))
        observations, actions, rewards = columns
        starts = np.cumsum([0, *map(len, rewards)])
        returns = [np.cumsum(array[::-1].astype(np.float64))[::-1] for array in rewards]
        discrete = all(array.ndim == 1 and array.dtype.kind in "iub" for array in actions)
        wide = [array.reshape(len(array), -1).astype(np.float32) for array in actions]
        return cls(
            np.concatenate([array.reshape(len(array), -1).astype(np.float32) for array in observations]),
            np.concatenate(actions).astype(np.int64) if discrete else np.concatenate(wide),
            np.concatenate(returns).astype(np.float32),
            starts,
        )

    @property
    def discrete(self) -> bool:
        """Return whether an action is a choice instead of a vector."""
        return self.actions.ndim == 1

    @property
    def whole(self) -> np.ndarray:
        """Return the return of every episode."""
        return self.returns[self.starts[:-1]]

    @property
    def longest(self) -> int:
        """Return the number of steps of the longest episode."""
        return int(np.diff(self.starts).max())


def checked_episodes(
    rows: Iterable[dict[str, Any]], columns: dict[str, str], source: str
) -> Iterator[dict[str, Any]]:
    """Yield `rows` unchanged; an `InputError` names the row of an episode that is unusable for training."""
    names = {role: columns.get(role, role) for role in ROLES}
    widths: dict[str, tuple[int, ...]] = {}
    for number, row in enumerate(rows, 1):
        if all(name in row for name in names.values()):  # otherwise the reader reports the missing column
            where = f"{source}, row {number}"
            arrays = {name: _numbers(row[name], f"{where}: {quote(name)}") for name in names.values()}
            _check_lengths({name: len(array) for name, array in arrays.items()}, where)
            _check_widths(arrays, names, widths, where)
        yield row


def _numbers(value: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError(f"{where}: its steps are of several widths; give each as many numbers") from error
    if array.dtype.kind not in "iufb" or array.ndim not in (1, 2) or not array.size:
        raise InputError(f"{where}: expected a number, or a list of numbers, for each step")
    with np.errstate(over="ignore"):
        finite = np.isfinite(array.astype(np.float32))
    if not finite.all():
        step = int(np.argwhere(~finite)[0, 0])
        raise InputError(
            f"{where}: not a finite number (NaN, or too large) at step {step}; mend it or leave the row out"
        )
    return array


def _check_lengths(lengths: dict[str, int], where: str) -> None:
    if len({*lengths.values()}) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise InputError(
            f"{where}: expected as many of each, one a step, got {counts}; "
            "leave out the observation after the last step"
        )


def _check_widths(
    arrays: dict[str, np.ndarray], names: dict[str, str], widths: dict[str, tuple[int, ...]], where: str
) -> None:
    for role, name in names.items():
        width = arrays[name].shape[1:]
        if role == "rewards" and width:
            raise InputError(f"{where}: {quote(name)}: expected one number for each step, got {width[0]}")
        if widths.setdefault(name, width) != width:
            shapes = width, widths[name]
            now, before = (f"{shape[0]} numbers" if shape else "one number" for shape in shapes)
            raise InputError(
                f"{where}: {quote(name)}: expected {before} a step, as in the first row, got {now}"
            )


def read_npz(path: Path, header: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each episode of concatenated arrays [steps, ...], split by `terminals` or `timeouts`.

    Steps after the last end form an episode too. Nothing is unpickled.
    """
    try:
        _check_size(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, KeyError, MemoryError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path}: not a .npz file of numbers, or a damaged one ({reason:.100})") from error
    ends = [arrays.pop(name) for name in ENDS if name in arrays]
    if not ends or any(array.ndim != 1 or array.dtype.kind not in "biuf" for array in ends):
        raise InputError(
            f"{path}: expected an array 'terminals' [steps], true at the last step of each episode; "
            f"it has {', '.join(arrays) or 'none'}"
        )
    steps = len(ends[0])
    # Scalars describe the data set.
    arrays = {name: array for name, array in arrays.items() if array.ndim}
    lengths = {**{name: len(array) for name, array in arrays.items()}, ENDS[0]: steps, ENDS[1]: len(ends[-1])}
    for name, length in lengths.items():
        if length != steps:
            raise InputError(f"{path}: {quote(name)} has {length} steps where {quote(ENDS[0])} has {steps}")
    last = np.flatnonzero(np.any([array.astype(bool) for array in ends], axis=0)) + 1
    for start, end in zip([0, *last], [*last, steps]):
        if start < end:
            yield {name: array[start:end].tolist() for name, array in arrays.items()}


def _check_size(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        size = sum(member.file_size for member in file.infolist())
    if size > max(EXPANDED, EXPANSION * path.stat().st_size):
        raise InputError(f"{path}: more than {EXPANSION} times as large as its file says: refused")
