"""Images from files and from scikit-learn: read as they are, held out evenly, refused where damaged."""

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from polyformer import InputError
from polyformer.data import DataConfig, load, read
from polyformer.data.formats.images import default_images, quantised, read_idx
from polyformer.data.sources.checks import data_changes, fingerprint

NEEDS = "image", "height", "width"
PIXELS = np.arange(3 * 2 * 5, dtype=np.uint8).reshape(3, 2, 5)
WHOLE = struct.pack(">IIII", 0x803, 3, 2, 5) + PIXELS.tobytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["some-images-idx3-ubyte", "some-images-idx3-ubyte.gz", "a.idx3-ubyte", "x.bin"]
)
def test_idx_files_are_read(folder: Path, name: str):
    (folder / name).write_bytes(gzip.compress(WHOLE) if name.endswith(".gz") else WHOLE)
    rows = list(read(DataConfig(format="idx" if name == "x.bin" else None), NEEDS, name))
    assert [row["image"] for row in rows] == [image.tobytes() for image in PIXELS]
    assert {(row["height"], row["width"]) for row in rows} == {(2, 5)}


LABELS = struct.pack(">II", 0x801, 3) + bytes([7, 2, 7])


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_labels_are_read_from_the_file_next_to_the_images(folder: Path, ending: str):
    (folder / "train-images-idx3-ubyte").write_bytes(WHOLE)
    labels = folder / f"train-labels-idx1-ubyte{ending}"
    labels.write_bytes(gzip.compress(LABELS) if ending else LABELS)
    config = DataConfig(path="train-images-idx3-ubyte")
    assert [row["label"] for row in read(config, (*NEEDS, "label"), config.path)] == ["7", "2", "7"]
    before = fingerprint(config, (*NEEDS, "label"))
    labels.write_bytes(gzip.compress(LABELS[:-1] + b"\1") if ending else LABELS[:-1] + b"\1")
    (change,) = data_changes(before, fingerprint(config, (*NEEDS, "label")))
    assert change.startswith(f"train-labels-idx1-ubyte{ending}: ")
    assert len(fingerprint(config, NEEDS)["path"]) == 1


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (struct.pack(">II", 0x801, 2) + b"ab", "a-labels-idx1-ubyte: 2 labels for the 3 images in a-images-"),
        (LABELS[:-1], "a-labels-idx1-ubyte: damaged: its head announces 3 labels, got another number"),
        (LABELS + b"x", "a-labels-idx1-ubyte: damaged: its head announces 3 labels"),
        (WHOLE, "a-labels-idx1-ubyte: not an IDX file of labels, which begins with 0x00000801"),
    ],
)
def test_labels_that_do_not_fit_are_refused(folder: Path, labels: bytes, message: str):
    (folder / "a-images-idx3-ubyte").write_bytes(WHOLE)
    (folder / "a-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(InputError, match=message):
        read(DataConfig(), NEEDS, "a-images-idx3-ubyte")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (WHOLE[:7], "damaged-ubyte: truncated: 7 bytes, expected a head of 16"),
        (WHOLE[:-1], "truncated: it ends in image 3 of 3"),
        (WHOLE[:16], "truncated: it ends in image 1 of 3"),
        (WHOLE + b"x", "damaged: it has more data than the 3 images"),
        (
            struct.pack(">IIII", 0x801, 3, 2, 5) + b"xyz",
            "not an IDX file of images: it begins with 0x00000801",
        ),
        (
            b"<!DOCTYPE html><html>",
            "not an IDX file of images: it begins with 0x3c21444f, expected 0x00000803",
        ),
        (struct.pack(">IIII", 0x803, 3, 0, 5), "expected images of 1 to 67108864 pixels, got 0 x 5"),
        (struct.pack(">IIII", 0x803, 1, 65536, 65536), "expected images of 1 to .*, got 65536 x 65536"),
        (struct.pack(">IIII", 0x803, 0, 2, 5), "empty: there is nothing to read in it"),
        (gzip.compress(WHOLE, mtime=0)[:-12], "truncated: the gzip file ends too early"),
        (gzip.compress(WHOLE, mtime=0)[:20] + b"\0" * 9, "damaged gzip file|truncated"),
    ],
)
def test_damaged_files_are_refused(folder: Path, data: bytes, message: str):
    (folder / "damaged-ubyte").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read(DataConfig(), NEEDS, "damaged-ubyte")


def test_a_text_is_no_image(folder: Path):
    (folder / "rows.csv").write_text("image,height,width\nx,1,1\n")
    with pytest.raises(InputError, match="column 'image' holds 'x', expected an image"):
        read(DataConfig(), NEEDS, "rows.csv")


def test_mnist_is_read(shared_data):
    rows = list(read_idx(shared_data("mnist_t10k") / "t10k-images-idx3-ubyte.gz"))
    assert len(rows) == 10_000
    assert {(row["height"], row["width"], len(row["image"])) for row in rows} == {(28, 28, 784)}
    assert [row["label"] for row in rows[:10]] == list("7210414959")
    mean = np.mean([np.frombuffer(row["image"], np.uint8).mean() for row in rows])
    assert mean == pytest.approx(33.79, abs=0.01), "0.1325 of white, the known mean of the test images"


def test_default_images_keep_their_17_levels():
    from sklearn.datasets import load_digits

    rows, digits = list(default_images()), load_digits().images
    assert len(rows) == len(digits) == 1797
    levels = np.stack([quantised(row["image"], 17) for row in rows])
    np.testing.assert_array_equal(levels, digits.reshape(1797, 64))


def test_without_scikit_learn_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        InputError, match=r"scikit-learn.* is not installed; pip install 'polyformer\[image\]'"
    ):
        next(default_images())


def test_levels_have_equal_width():
    every = bytes(range(256))
    assert quantised(every, 256).tolist() == list(range(256))
    assert np.bincount(quantised(every, 16)).tolist() == [16] * 16
    assert quantised(every, 3).max() == 2


def test_splits_are_even_disjoint_and_the_same_every_time():
    config = DataConfig(validation_fraction=0.1, test_fraction=0.2)
    first, again = load(config, NEEDS), load(config, NEEDS)
    parts = [[row["image"] for row in rows] for rows in first if rows is not None]
    assert parts == [[row["image"] for row in rows] for rows in again if rows is not None]
    assert [len(part) for part in parts] == [1294, 144, 359]
    everything = sorted(row["image"] for row in default_images())
    assert sorted(image for part in parts for image in part) == everything


def test_a_test_part_goes_with_every_kind_of_validation(folder: Path):
    (folder / "a.csv").write_text("text,label\n" + "".join(f"t{i},{i % 2}\n" for i in range(20)))
    (folder / "b.csv").write_text("text,label\nheld,1\n")
    needs = "text", "label"
    named = load(DataConfig(path="a.csv", validation="b.csv", test_fraction=0.1), needs)
    none = load(DataConfig(path="a.csv", validation_fraction=0, test_fraction=0.1), needs)
    assert [len(list(rows)) if rows is not None else None for rows in named] == [18, 1, 2]
    assert [len(list(rows)) if rows is not None else None for rows in none] == [18, None, 2]
    (folder / "c.csv").write_text("text,label\nheld,1\n")
    with pytest.raises(InputError, match=r"test_fraction: c\.csv is too short to hold so much of it out"):
        load(DataConfig(path="c.csv", test_fraction=0.1), needs)
    with pytest.raises(InputError, match=r"test_fraction: expected a share from 0 to 0\.5, got 0\.6"):
        DataConfig(test_fraction=0.6)
    with pytest.raises(InputError, match="test_fraction: rows are held out in memory"):
        DataConfig(test="b.csv", test_fraction=0.1)
