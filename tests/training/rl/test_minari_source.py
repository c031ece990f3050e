"""Data sets of Minari's as sources: by id, by folder, in each of its formats, and what is wrong with one."""

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer

from polyformer import InputError
from polyformer.data import DataConfig, read
from polyformer.data.episodes import ROLES, environment_of, is_minari
from polyformer.data.formats.guess import guess
from polyformer.data.sources.checks import fingerprint
from polyformer.data.sources.origins import has_validation
from polyformer.training.recipes.recipe import absolute, with_data
from polyformer.training.tasks import ActionPredictionConfig

CART = "minari:cart/mixed-v0"
VECTOR = spaces.Box(-1, 1, (2,), np.float32)


def rows(path: str) -> list[Any]:
    return list(read(DataConfig(), ROLES, path))


def store(
    name: str, seen: spaces.Space = VECTOR, actions: spaces.Space | None = None, **changes: Any
) -> None:
    """A data set of two random episodes of three steps; `changes` in each, and in how they are kept."""
    actions = actions or spaces.Discrete(2)
    how = {key: changes.pop(key) for key in ("env", "data_format") if key in changes}
    buffers = [
        EpisodeBuffer(
            **{
                "observations": [seen.sample() for _ in range(4)],
                "actions": [actions.sample() for _ in range(3)],
                "rewards": [1.0, 2.0, 3.0],
                "terminations": [False, False, True],
                "truncations": [False] * 3,
                **changes,
            }
        )
        for _ in range(2)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        minari.create_dataset_from_buffers(
            name, buffers, observation_space=seen, action_space=actions, **{"data_format": "arrow", **how}
        )


@pytest.fixture
def empty_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


def test_an_id_and_both_folders_are_the_same_rows(minari_here: Path):
    by_id, folder = rows(CART), minari_here / "cart" / "mixed-v0"
    assert rows(str(folder)) == rows(str(folder / "data")) == by_id
    assert is_minari(CART)
    assert is_minari(str(folder))
    assert not is_minari(str(minari_here))
    assert not has_validation(str(folder))
    assert guess(CART, {}).kind == guess(str(folder), {}).kind == "act"
    assert absolute(with_data({"path": None}, CART)) == {"path": CART}
    prints = [fingerprint(DataConfig(path=path), ROLES)["path"] for path in (CART, str(folder))]
    assert prints[0] == prints[1]
    assert len(prints[0]) > 24


@pytest.mark.parametrize("format", ["arrow", "parquet", "hdf5"])
def test_every_format_is_read(format: str, empty_root: Path):
    if format == "hdf5":
        pytest.importorskip("h5py")
    store("some/kept-v0", data_format=format, actions=spaces.Box(-2, 2, (1,), np.float64))
    kept = rows("minari:some/kept-v0")
    assert [row["rewards"] for row in kept] == [[1.0, 2.0, 3.0]] * 2
    assert np.shape([row["observations"] for row in kept]) == (2, 3, 2)
    assert np.shape([row["actions"] for row in kept]) == (2, 3, 1)
    assert environment_of("minari:some/kept-v0") is None


def test_the_task_knows_where_its_episodes_were_recorded(minari_here: Path, empty_root: Path):
    config = ActionPredictionConfig()
    shutil.copytree(minari_here / "cart", empty_root / "cart")
    known = config.with_source_defaults(CART)
    assert (known.environment, known.environment_options) == ("CartPole-v1", {"max_episode_steps": 30})
    assert config.with_source_defaults("episodes.jsonl") == config.with_source_defaults(None) == config
    named = ActionPredictionConfig(environment="Acrobot-v1")
    assert named.with_source_defaults(CART) == named
    file = empty_root / "cart" / "mixed-v0" / "data" / "metadata.json"
    metadata = json.loads(file.read_text())
    spec = {**json.loads(metadata["env_spec"]), "id": "os:CartPole-v1"}
    file.write_text(json.dumps({**metadata, "env_spec": json.dumps(spec)}))
    assert config.with_source_defaults(CART).environment is None, "a name of a module to import"


def test_a_data_set_that_is_not_here_is_downloaded(empty_root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(minari, "download_dataset", lambda name: store(name))
    assert len(rows("minari:far/away-v0")) == 2

    def fails(name: str) -> None:
        raise ConnectionError("Name or service not known\nmore")

    monkeypatch.setattr(minari, "download_dataset", fails)
    with pytest.raises(
        InputError, match=r"cannot be downloaded \(Name or service not known\); record one by"
    ):
        rows("minari:far/other-v0")
    with pytest.raises(InputError, match="expected the id of a data set, as in minari:cart"):
        rows("minari:")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rewards": [1.0, float("nan"), 0.0]},
            "row 1: 'rewards': not a finite number .NaN, or too large. at st",
        ),
        (
            {"seen": spaces.Discrete(4)},
            r"its observations are 'Discrete\(4\)', expected a Box of one dimension",
        ),
        ({"seen": spaces.Box(0, 255, (3, 2), np.uint8)}, "FlattenObservation around the environment"),
        (
            {"actions": spaces.MultiDiscrete([2, 2])},
            r"its actions are 'MultiDiscrete\(\[2 2\]\)', expected a B",
        ),
        ({"actions": spaces.Discrete(2, start=1)}, r"expected a Box of one dimension, or a Discrete from 0"),
    ],
)
def test_episodes_of_other_spaces_are_refused(changes: dict[str, Any], message: str, empty_root: Path):
    store("some/kept-v0", **changes)
    with pytest.raises(InputError, match=message):
        rows("minari:some/kept-v0")


def test_missing_and_damaged_files_are_named(minari_here: Path, empty_root: Path):
    import pyarrow as pa

    def fresh() -> Path:
        shutil.rmtree(empty_root / "cart", ignore_errors=True)
        shutil.copytree(minari_here / "cart", empty_root / "cart")
        return empty_root / "cart" / "mixed-v0" / "data"

    file = next((fresh() / "3").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(
        InputError, match=r"cart/mixed-v0: not a data set of Minari's, or a damaged one \(Error"
    ):
        rows(CART)
    file = next((fresh() / "3").glob("*.arrow"))
    table = pa.ipc.open_file(file).read_all().drop_columns(["rewards"])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(InputError, match=r"row 4: 'rewards': not a finite number \(NaN"):
        rows(CART)
    shutil.rmtree(fresh() / "5")
    with pytest.raises(InputError, match="or a damaged one"):
        rows(CART)
    (fresh() / "metadata.json").write_text('{"data_format": "arrow", ')
    with pytest.raises(InputError, match=r"metadata\.json"):
        rows(CART)
    metadata = json.loads((fresh() / "metadata.json").read_text())
    for name, value in {"minari_version": "9.9", "observation_space": "{}", "data_format": "tape"}.items():
        (fresh() / "metadata.json").write_text(json.dumps({**metadata, name: value}))
        with pytest.raises(InputError, match=r"cart/mixed-v0: a damaged data set .*; record it again"):
            rows(CART)


def test_data_without_spaces_make_nothing_be_imported(
    minari_here: Path, empty_root: Path, monkeypatch: pytest.MonkeyPatch
):
    """Minari makes the environment to ask for its spaces: an entry point may be any function."""
    shutil.copytree(minari_here / "cart", empty_root / "cart")
    file = empty_root / "cart" / "mixed-v0" / "data" / "metadata.json"
    metadata = json.loads(file.read_text())
    del metadata["action_space"]
    file.write_text(json.dumps(metadata))
    monkeypatch.setattr(gymnasium, "make", lambda *arguments: pytest.fail("it made the environment"))
    with pytest.raises(
        InputError, match=r"metadata\.json does not describe its spaces; record it with Minari"
    ):
        rows(CART)


def test_without_a_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, empty_root: Path):
    pytest.importorskip("h5py")
    store("some/kept-v0", data_format="hdf5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    monkeypatch.delitem(sys.modules, "minari.dataset._storages.hdf5_storage", raising=False)
    with pytest.raises(InputError, match=r"some/kept-v0: h5py .*pip install 'polyformer\[agents\]'"):
        rows("minari:some/kept-v0")
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(InputError, match=r"minari: .*pip install 'polyformer\[agents\]'"):
        rows(CART)


def linked_outside(file: Path, private: Path) -> None:
    shutil.copy(file, private)
    file.unlink()
    file.symlink_to(private)


def as_external_link(file: Path, private: Path) -> None:
    import h5py

    shutil.copy(file, private)
    with h5py.File(file, "r+") as opened:
        del opened["episode_0/rewards"]
        opened["episode_0/rewards"] = h5py.ExternalLink(str(private), "episode_0/rewards")


def as_bytes_of_any_file(file: Path, private: Path) -> None:
    """HDF5 reads the numbers of a dataset from any file."""
    import h5py

    private.write_bytes(np.arange(3.0).tobytes())
    with h5py.File(file, "r+") as opened:
        del opened["episode_0/rewards"]
        opened["episode_0"].create_dataset(
            "rewards", (3,), "f8", external=[(str(private), 0, private.stat().st_size)]
        )


def as_virtual_dataset(file: Path, private: Path) -> None:
    import h5py

    shutil.copy(file, private)
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(str(private), "episode_0/rewards", (3,))
    with h5py.File(file, "r+") as opened:
        del opened["episode_0/rewards"]
        opened["episode_0"].create_virtual_dataset("rewards", layout)


@pytest.mark.parametrize("move", [linked_outside, as_external_link, as_bytes_of_any_file, as_virtual_dataset])
def test_no_part_of_a_data_set_is_elsewhere(move: Any, empty_root: Path, tmp_path_factory: Any):
    pytest.importorskip("h5py")
    import h5py

    store("some/kept-v0", data_format="hdf5")
    file = empty_root / "some" / "kept-v0" / "data" / "main_data.hdf5"
    with h5py.File(file, "r+") as opened:
        opened["episode_0/again"] = opened["/"]  # a group that contains itself
    assert len(rows("minari:some/kept-v0")) == 2
    move(file, tmp_path_factory.mktemp("private") / "private")
    with pytest.raises(InputError, match=r"is a link to a file outside of the data set|is in another file"):
        rows("minari:some/kept-v0")
