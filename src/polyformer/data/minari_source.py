"""Episodes as Minari keeps them: `minari:ID` names a local data set, or one of its remote catalogue, which is
downloaded; the folder of a data set does as well.

Observations are vectors (a `Box` of one dimension), actions vectors or choices (`Discrete`). Of the
observations, of which an episode has one more than actions, the last is left out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, quote, reason_of
from polyformer.core.files import read_json

PREFIX = "minari:"
METADATA = "metadata.json"


def is_minari(path: str | None) -> bool:
    """Whether the source `path` is a data set of Minari's."""
    return path is not None and (path.startswith(PREFIX) or _data_folder(Path(path)) is not None)


def minari_files(path: str) -> list[Path]:
    """The files of the data set, in order; none where it is not here yet."""
    folder = _data_folder(_place(path))
    return [] if folder is None else sorted(file for file in folder.rglob("*") if file.is_file())


def read_minari(path: str) -> Iterator[dict[str, Any]]:
    """A row for each episode: lists observations, actions and rewards.

    Raises `InputError` for one that cannot be downloaded, is damaged, or has other spaces.
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
    except Exception as error:  # Minari, pyarrow, h5py and json have exceptions of their own
        raise InputError(
            f"{path}: not a data set of Minari's, or a damaged one ({_reason(error)}); record or download it "
            "again"
        ) from error


def environment_of(path: str) -> tuple[str, dict[str, Any], tuple[str, ...]] | None:
    """The id of the environment where the data set was recorded, its options and its wrappers
    ('module:Class', the innermost first), if known.

    An id that names a module to import ("module:ID") is left out: data make nothing be imported.
    """
    spec = _opened(path).env_spec
    if spec is None or ":" in spec.id:
        return None
    options = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}  # a window
    if spec.max_episode_steps is not None:
        options["max_episode_steps"] = spec.max_episode_steps
    return spec.id, options, tuple(wrapper.entry_point for wrapper in spec.additional_wrappers)


def is_vector(space: Any) -> bool:
    """Whether a space of gymnasium's is a `Box` of one dimension."""
    from gymnasium.spaces import Box

    return isinstance(space, Box) and len(space.shape) == 1


def is_choice(space: Any) -> bool:
    """Whether it is `Discrete`, from 0 on."""
    from gymnasium.spaces import Discrete

    return isinstance(space, Discrete) and space.start == 0


def minari_library() -> Any:
    """The module `minari`; `InputError` where it is not installed."""
    try:
        import minari
    except ImportError as error:
        raise InputError(
            "minari: recorded episodes need it, and it is not installed; pip install 'polyformer[agents]'"
        ) from error
    return minari


def _check_spaces(where: str, observations: Any, actions: Any) -> None:
    """Raises `InputError` unless observations are vectors, and actions vectors or choices."""
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
    """The `MinariDataset`, downloaded where it is not here; `InputError` where that fails."""
    minari = minari_library()
    if path.startswith(PREFIX) and _data_folder(_place(path)) is None:
        _download(path)
    folder = _data_folder(_place(path))
    if folder is None:
        raise InputError(f"{path}: {_place(path)} is no data set of Minari's, it has no data/{METADATA}")
    metadata = read_json(folder / METADATA, dict)
    if (
        not {"observation_space", "action_space"} <= metadata.keys()
    ):  # it would make the environment, any code
        raise InputError(
            f"{path}: {folder / METADATA} says nothing of its spaces; record it with Minari 0.4 on"
        )
    try:
        return minari.MinariDataset(folder)
    except ImportError as error:
        raise InputError(f"{path}: {_reason(error)} (pip install 'polyformer[agents]')") from error
    except Exception as error:
        raise InputError(f"{path}: a damaged data set ({_reason(error)}); record it again") from error


def _download(path: str) -> None:
    name = path.removeprefix(PREFIX)
    try:
        minari_library().download_dataset(name)
    except Exception as error:  # of the network, of its storage, of what it finds there
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
    """Where its metadata lie: in the folder of a data set, or in its part `data`."""
    if (path / "data" / METADATA).is_file():
        return path / "data"
    file = path / METADATA
    is_data = file.is_file() and b'"data_format"' in file.read_bytes()[: 1 << 20]
    return path if is_data else None


def _reason(error: Exception) -> str:
    return f"{reason_of(error):.150}"
