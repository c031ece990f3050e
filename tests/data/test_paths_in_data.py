"""Paths inside somebody else's data lead nowhere else: neither to files of this machine nor to addresses."""

import io
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from polyformer import InputError
from polyformer.data import DataConfig, read
from polyformer.data.sources.libraries import hub_image
from polyformer.data.sources.origins import open_source

NEEDS = "image", "height", "width"
PRIVATE = "a private text"


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), "red").save(file, "PNG")
    return file.getvalue()


def stored(folder: Path, column: list[dict[str, Any]]) -> None:
    """Save a data set with images as they are in `column`, without a look at them."""
    features = datasets.Features({"image": datasets.Image()})
    saved = datasets.Dataset.from_list(
        [{"image": {"bytes": png(), "path": None}}] * len(column), features=features
    )
    saved.save_to_disk(str(folder))
    (file,) = folder.glob("*.arrow")
    import pyarrow as pa

    with pa.OSFile(str(file), "wb") as sink:
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        batch = pa.table({"image": pa.array(column, kind)}).to_batches()[0]
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A private image, outside of the data."""
    path = tmp_path / "private" / "a.png"
    path.parent.mkdir()
    path.write_bytes(png())
    return path


def refuses(path: Path, needs: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(DataConfig(), needs, str(path))


def test_an_image_of_a_saved_data_set_is_inside_it(tmp_path: Path, outside: Path):
    folder = tmp_path / "saved"
    stored(folder, [{"bytes": None, "path": "inside.png"}, {"bytes": png(), "path": "/anywhere.png"}])
    shutil.copy(outside, folder / "inside.png")
    assert [row["height"] for row in read(DataConfig(), NEEDS, str(folder))] == [4, 4]
    (folder / "inside.png").unlink()
    (folder / "inside.png").symlink_to(outside)
    refuses(folder, NEEDS, "names the image 'inside.png', which is outside of the data set")


@pytest.mark.parametrize(
    "path",
    ["{}", "../private/a.png", "file://{}", "/dev/zero", "/dev/stdin", "~/a.png", "\0", "", ".", "a" * 5000],
)
def test_other_images_are_not_read(tmp_path: Path, outside: Path, path: str):
    folder = tmp_path / "saved"
    stored(folder, [{"bytes": None, "path": path.format(outside)}])
    refuses(folder, NEEDS, "outside of the data set|cannot be read|no such file|expected a file")


def test_a_fifo_is_not_waited_for(tmp_path: Path):
    folder = tmp_path / "saved"
    stored(folder, [{"bytes": None, "path": "pipe"}])
    os.mkfifo(folder / "pipe")
    refuses(folder, NEEDS, "pipe: expected a file, got a FIFO")


@pytest.mark.parametrize("address", ["http://127.0.0.1:{}/a.png", "zip://a.png::http://127.0.0.1:{}/a.zip"])
def test_no_address_is_requested(tmp_path: Path, address: str):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.1)
        folder = tmp_path / "saved"
        stored(folder, [{"bytes": None, "path": address.format(server.getsockname()[1])}])
        refuses(folder, NEEDS, "cannot be read|no such file")
        with pytest.raises(TimeoutError):
            server.accept()


def test_the_files_of_a_saved_data_set_are_inside_it(tmp_path: Path):
    rows = datasets.Dataset.from_list([{"text": PRIVATE}])
    for name in ("saved", "private"):
        rows.save_to_disk(str(tmp_path / name))
    folder, private = tmp_path / "saved", next((tmp_path / "private").glob("*.arrow"))
    state = json.loads((folder / "state.json").read_text())
    for name in (f"../private/{private.name}", str(private), "..", "", 5, None):
        (folder / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": name}]}))
        refuses(folder, ("text",), "expected names of its files in state.json")
    for files in (5, {"filename": "x"}, ["x"], None):
        (folder / "state.json").write_text(json.dumps({**state, "_data_files": files}))
        refuses(folder, ("text",), "expected names of its files in state.json")
    (folder / "link.arrow").symlink_to(private)
    (folder / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": "link.arrow"}]}))
    refuses(folder, ("text",), r"link.arrow is a link to a file outside of the data set")


def test_the_splits_of_a_saved_data_set_are_inside_it(tmp_path: Path):
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "a"}])}).save_to_disk(
        str(tmp_path / "saved")
    )
    shutil.move(tmp_path / "saved" / "train", tmp_path / "elsewhere")
    (tmp_path / "saved" / "train").symlink_to(tmp_path / "elsewhere")
    refuses(tmp_path / "saved", ("text",), "train is a link to a folder outside of")
    for splits in (["../elsewhere"], [".."], 5, [5]):
        (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
        refuses(tmp_path / "saved", ("text",), "dataset_dict.json: damaged: expected names of folders")


def test_a_damaged_table_is_not_read(tmp_path: Path):
    datasets.Dataset.from_list([{"text": "some words"}] * 3).save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    whole = file.read_bytes()
    at = whole.index(b"some wordssome words") - 16  # the offsets of the texts
    file.write_bytes(whole[:at] + b"\xff\xff\xff\x7f" + whole[at + 4 :])
    refuses(tmp_path / "saved", ("text",), "a damaged data set")


def test_a_class_that_a_data_set_does_not_have(tmp_path: Path):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    datasets.Dataset.from_list([{"text": "x", "label": 1}], features=features).save_to_disk(
        str(tmp_path / "saved")
    )
    info = json.loads((tmp_path / "saved" / "dataset_info.json").read_text())
    info["features"]["label"]["names"] = ["a"]
    (tmp_path / "saved" / "dataset_info.json").write_text(json.dumps(info))
    refuses(tmp_path / "saved", ("text", "label"), "expected a class below 1, got 1")


@pytest.mark.parametrize("place", ["folder", "file"])
@pytest.mark.parametrize("split", ["", "train"])
def test_a_folder_of_labels_has_no_links_to_other_places(tmp_path: Path, place: str, split: str):
    secret = tmp_path / "private" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text(PRIVATE)
    labels = tmp_path / "reviews" / split
    for label in ("bad", "good"):
        (labels / label).mkdir(parents=True)
        (labels / label / "1.txt").write_text(label)
    (labels / "bad" / "2.txt").symlink_to(labels / "good" / "1.txt")
    assert len(read(DataConfig(), ("text", "label"), str(tmp_path / "reviews"))) == 3
    if place == "file":
        (labels / "good" / "2.txt").symlink_to(secret)
    else:
        (labels / "other").symlink_to(secret.parent)
    refuses(tmp_path / "reviews", ("text", "label"), r"txt is a link to a file outside of")


def test_a_pattern_follows_no_link_to_another_place(tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text(PRIVATE)
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "more" / "b.txt").symlink_to(folder / "a.txt")
    assert [row["text"] for row in open_source(f"{folder}/**/*.txt", "train")] == ["a", "a"]
    (folder / "more" / "c.txt").symlink_to(secret)
    with pytest.raises(InputError, match=r"c.txt is a link to a file outside of the folder of the pattern"):
        list(open_source(f"{folder}/**/*.txt", "train"))
    assert [row["text"] for row in open_source(str(folder / "more" / "c.txt"), "train")] == [PRIVATE], "named"


def test_the_cache_of_the_hub_is_a_folder_of_links(tmp_path: Path):
    files = tmp_path / "datasets--a--b" / "snapshots" / "abc" / "data"
    blob = tmp_path / "datasets--a--b" / "blobs" / "0123"
    for folder in (files, blob.parent):
        folder.mkdir(parents=True)
    blob.write_text("a")
    (files / "a.txt").symlink_to(blob)
    assert [row["text"] for row in open_source(f"{files}/*.txt", "train")] == ["a"]


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "http://127.0.0.1:1/a.png",
        "zip://a.png::/a.zip",
        "simplecache::hf://datasets/a/b/c.png",
        "file:///etc/passwd::hf://datasets/a/b/c.png",
        "",
    ],
)
def test_an_image_of_a_hub_data_set_is_on_the_hub(path: str):
    with pytest.raises(InputError, match=r"hub:a/b: a row names the image .*, which is not on the hub"):
        hub_image("hub:a/b", path)
