"""Recorded episodes: an observation, an action and a reward for every step; Minari's format; windows.

A row is an episode: lists `observations`, `actions` and `rewards` of equal length. An observation is a number
or a list of numbers. So is an action; an action that is a single integer is a discrete choice.

`minari:ID` names a local data set or a remote data set, which is downloaded; the folder of a data set is
accepted too. Observations are vectors (a `Box` of one dimension), actions vectors or choices (`Discrete`). An
episode has one more observation than actions; the last observation is left out.

Batches of windows are in an order that is a function of (seed, epoch) only.
"""

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyformer.core.errors import InputError, quote, reason_of
from polyformer.core.files import read_json
from polyformer.core.imports import needs_extra
from polyformer.core.paths import leaves_folder
from polyformer.core.ranges import EXPANDED, EXPANSION
from polyformer.data.rows import Batch, Position

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


PREFIX = "minari:"
METADATA = "metadata.json"


def is_minari(path: str | None) -> bool:
    """Return whether the source `path` is a Minari data set."""
    return path is not None and (path.startswith(PREFIX) or _data_folder(Path(path)) is not None)


def minari_files(path: str) -> list[Path]:
    """Return the files of the data set, in order; an empty list if it is not downloaded yet."""
    folder = _data_folder(_place(path))
    return [] if folder is None else sorted(file for file in folder.rglob("*") if file.is_file())


def read_minari(path: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each episode: lists observations, actions and rewards.

    Raises `InputError` for a data set that cannot be downloaded, is damaged, or has other spaces.
    """
    try:
        dataset = _opened(path)
        _check_spaces(path, dataset.observation_space, dataset.action_space)
        for episode in dataset.iterate_episodes():
            arrays = {
                "observations": np.asarray(episode.observations)[: len(episode.actions)],
                "actions": np.asarray(episode.actions),
                "rewards": np.asarray(episode.rewards),
            }
            yield {name: array.tolist() for name, array in arrays.items()}
    except InputError:
        raise
    except Exception as error:  # Minari, pyarrow, h5py and json raise different exceptions
        raise InputError(
            f"{path}: not a data set of Minari's, or a damaged one ({_reason(error)}); record or download it "
            "again"
        ) from error


def environment_of(path: str) -> tuple[str, dict[str, Any], tuple[str, ...]] | None:
    """Return the id, options and wrappers of the environment in which the data set was recorded, if known.

    Wrappers are 'module:Class', the innermost first. An id that names a module to import ("module:ID") is
    ignored, so that data cannot trigger imports.
    """
    spec = _opened(path).env_spec
    if spec is None or ":" in spec.id:
        return None
    options = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}  # opens a window
    if spec.max_episode_steps is not None:
        options["max_episode_steps"] = spec.max_episode_steps
    return spec.id, options, tuple(wrapper.entry_point for wrapper in spec.additional_wrappers)


def is_vector(space: Any) -> bool:
    """Return whether a gymnasium space is a `Box` of one dimension."""
    from gymnasium.spaces import Box

    return isinstance(space, Box) and len(space.shape) == 1


def is_choice(space: Any) -> bool:
    """Return whether a gymnasium space is `Discrete` and starts at 0."""
    from gymnasium.spaces import Discrete

    return isinstance(space, Discrete) and space.start == 0


def minari_library() -> Any:
    """Return the module `minari`; raises `InputError` if it is not installed."""
    with needs_extra("agents", "minari: recorded episodes need it, and it is not installed"):
        import minari
    return minari


def _check_spaces(where: str, observations: Any, actions: Any) -> None:
    """Raise `InputError` unless observations are vectors, and actions vectors or choices."""
    if not is_vector(observations):
        raise InputError(
            f"{where}: its observations are {quote(str(observations))}, expected a Box of one dimension; "
            "record it with gymnasium.wrappers.FlattenObservation around the environment"
        )
    if not is_choice(actions) and not is_vector(actions):
        raise InputError(
            f"{where}: its actions are {quote(str(actions))}, expected a Box of one dimension, or a Discrete "
            "from 0; record it with a gymnasium.ActionWrapper that makes them so"
        )


def _opened(path: str) -> Any:
    """Open the `MinariDataset`, downloaded if necessary; raises `InputError` if that fails."""
    minari = minari_library()
    if path.startswith(PREFIX) and _data_folder(_place(path)) is None:
        _download(path)
    folder = _data_folder(_place(path))
    if folder is None:
        raise InputError(f"{path}: {_place(path)} is no data set of Minari's, it has no data/{METADATA}")
    metadata = read_json(folder / METADATA, dict)
    if (
        not {"observation_space", "action_space"} <= metadata.keys()
    ):  # Minari would make the environment and run its code
        raise InputError(
            f"{path}: {folder / METADATA} does not describe its spaces; record it with Minari 0.4 or later"
        )
    _check_places(path, folder)
    try:
        return minari.MinariDataset(folder)
    except ImportError as error:
        raise InputError(f"{path}: {_reason(error)} (pip install 'polyformer[agents]')") from error
    except Exception as error:
        raise InputError(f"{path}: a damaged data set ({_reason(error)}); record it again") from error


def _check_places(path: str, folder: Path) -> None:
    """Raise `InputError` if a file of the data set `path` is elsewhere, by a link or as a part in HDF5."""
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        if leaves_folder(folder, file):
            raise InputError(f"{file} is a link to a file outside of the data set; put the file itself there")
        if file.suffix == ".hdf5":
            with needs_extra("agents", f"{path}: h5py is not installed, which reads {file.name}"):
                import h5py
            try:
                with h5py.File(file, "r") as group:
                    _check_parts(group, file)
            except (OSError, RuntimeError, KeyError) as error:
                raise InputError(f"{file}: damaged ({_reason(error)}); record it again") from error


def _check_parts(root: Any, file: Path) -> None:
    """Raise `InputError` if a part of an HDF5 file is in another file, as HDF5 allows in three ways."""
    import h5py

    groups, seen = [root], {root}  # groups may contain one another
    while groups:
        group = groups.pop()
        for name in group:
            outside = isinstance(group.get(name, getlink=True), h5py.ExternalLink)
            part = None if outside else group[name]
            if isinstance(part, h5py.Dataset):
                outside = bool(part.external) or part.is_virtual
            if outside:
                raise InputError(f"{file}: its part {quote(name)} is in another file; record it in one file")
            if isinstance(part, h5py.Group) and part not in seen:
                seen.add(part)
                groups.append(part)


def _download(path: str) -> None:
    name = path.removeprefix(PREFIX)
    try:
        minari_library().download_dataset(name)
    except Exception as error:  # errors of the network, the storage or the content
        raise InputError(
            f"{path}: not among the local data sets ({_place(path)}), and cannot be downloaded "
            f"({_reason(error)}); record one by `polyformer record`, see `minari list remote`, or download "
            "it elsewhere and give its folder"
        ) from error


def _place(path: str) -> Path:
    if not path.startswith(PREFIX):
        return Path(path)
    minari_library()
    from minari.storage import get_dataset_path

    name = path.removeprefix(PREFIX)
    if not name:
        raise InputError(f"{path}: expected the id of a data set, as in {PREFIX}cartpole/mixed-v0")
    return Path(get_dataset_path(name))


def _data_folder(path: Path) -> Path | None:
    """Return the folder of a data set's metadata: the data set's folder or its subfolder `data`."""
    if (path / "data" / METADATA).is_file():
        return path / "data"
    file = path / METADATA
    is_data = file.is_file() and b'"data_format"' in file.read_bytes()[: 1 << 20]
    return path if is_data else None


def _reason(error: Exception) -> str:
    return f"{reason_of(error):.150}"


@dataclass(frozen=True, eq=False)
class EpisodeWindows:
    """Windows of at most `context` steps, left-padded, in batches of `batch_size`.

    With shuffling, an epoch has a window from every step on, so that episodes are drawn in proportion to
    their lengths (Chen et al. 2021, their code); otherwise windows are consecutive, with each step in a
    single window. Choices among `choices` actions become one-hot vectors.
    """

    episodes: Episodes
    context: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    choices: int = 0

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on, see `Batches.epoch`."""
        firsts = self._firsts(epoch)
        number = Position(*position).batch
        for start in range(number * self.batch_size, len(firsts), self.batch_size):
            number += 1
            yield Position(0, number), self._batch(firsts[start : start + self.batch_size])

    def _firsts(self, epoch: int) -> np.ndarray:
        """Return the first step of every window."""
        starts = self.episodes.starts
        if self.shuffle:
            return np.random.default_rng([self.seed, epoch]).permutation(starts[-1])
        return np.concatenate([np.arange(start, end, self.context) for start, end in pairwise(starts)])

    def _batch(self, firsts: np.ndarray) -> Batch:
        """Return the input of a `TrajectoryTransformer` [B, context, ...], and the actions as labels."""
        own, starts = self.episodes, self.episodes.starts
        episode = np.searchsorted(starts, firsts, "right") - 1
        ends = np.minimum(firsts + self.context, starts[episode + 1])
        steps = ends[:, None] - self.context + np.arange(self.context)
        real = steps >= firsts[:, None]
        steps = np.where(real, steps, firsts[:, None])
        labels = actions = own.actions[steps]
        if self.choices:
            actions = np.eye(self.choices, dtype=np.float32)[actions]
        arrays = {
            "states": own.observations[steps] * real[..., None],
            "actions": actions * real[..., None],
            "returns_to_go": (own.returns[steps] * real)[..., None],
            "timesteps": (steps - starts[episode][:, None]) * real,
            "attention_mask": real.astype(np.int64),
            "labels": labels,
        }
        return {
            name: torch.from_numpy(array.astype(np.float32) if array.dtype.kind == "f" else array)
            for name, array in arrays.items()
        }
