"""Episodes in Minari's format: `minari:ID` names a local data set or a remote data set, which is downloaded.

The folder of a data set is accepted too. Observations are vectors (a `Box` of one dimension), actions vectors
or choices (`Discrete`). An episode has one more observation than actions; the last observation is left out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, quote, reason_of
from polyformer.core.files import read_json
from polyformer.core.imports import needs_extra
from polyformer.core.paths import leaves_folder

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
