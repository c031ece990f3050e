"""Encoded images, folders of them and CIFAR's files: the pixels are right, what is no image is refused."""

import gzip
import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyformer import InputError
from polyformer.data import DataConfig, load, read

NEEDS = "image", "height", "width"
COLOURS = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def first(path: Path, **options: object) -> dict[str, object]:
    return next(iter(read(DataConfig(**options), NEEDS, str(path))))  # type: ignore[arg-type, return-value]


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Three cats and two dogs to train with, one of each to test with."""
    for split, label, number in [
        ("train", "cat", 3),
        ("train", "dog", 2),
        ("test", "cat", 1),
        ("test", "dog", 1),
    ]:
        folder = tmp_path / "pets" / split / label
        folder.mkdir(parents=True)
        for i in range(number):
            Image.fromarray(COLOURS + i).save(folder / f"{i}.png")
    (tmp_path / "pets" / "train" / "cat" / ".DS_Store").write_bytes(b"x")
    return tmp_path / "pets"


def test_colours_and_greys_come_as_they_are(tmp_path: Path):
    Image.fromarray(COLOURS).save(tmp_path / "a.png")
    Image.fromarray(COLOURS[..., 0]).save(tmp_path / "b.png")
    assert first(tmp_path / "a.png") == {"image": COLOURS.tobytes(), "height": 4, "width": 6}
    assert first(tmp_path / "b.png")["image"] == COLOURS[..., 0].tobytes()
    grey = first(tmp_path / "a.png", image_mode="grey")["image"]
    assert grey == Image.fromarray(COLOURS).convert("L").tobytes()
    assert first(tmp_path / "b.png", image_mode="rgb")["image"] == COLOURS[..., [0, 0, 0]].tobytes()


def test_a_jpeg_stands_as_its_camera_was_held(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    (tmp_path / "a.jpg").write_bytes(encoded(Image.fromarray(COLOURS), "JPEG", exif=exif))
    row = first(tmp_path / "a.jpg")
    assert (row["height"], row["width"], len(row["image"])) == (6, 4, 72)  # type: ignore[arg-type]


def test_transparency_lies_on_white_and_16_bits_are_scaled(tmp_path: Path):
    clear = np.dstack([COLOURS, np.zeros((4, 6), np.uint8)])
    Image.fromarray(clear, "RGBA").save(tmp_path / "a.png")
    assert first(tmp_path / "a.png")["image"] == b"\xff" * 72
    Image.fromarray(np.full((2, 2), 65535, np.uint16)).save(tmp_path / "b.png")
    assert first(tmp_path / "b.png")["image"] == b"\xff" * 4


def test_the_middle_is_scaled_to_a_size(tmp_path: Path):
    wide = np.zeros((4, 36, 3), np.uint8)
    wide[:, 12:24] = 200  # its middle third
    Image.fromarray(wide).save(tmp_path / "a.png")
    row = first(tmp_path / "a.png", image_size=(2, 2))
    assert (row["height"], row["width"], row["image"]) == (2, 2, b"\xc8" * 12)
    with pytest.raises(InputError, match=r"image_size\[0\]: expected 1 to 4096, got 0"):
        DataConfig(image_size=(0, 2))


def test_a_folder_per_label_with_splits(pets: Path):
    needs = "image", "height", "width", "label"
    splits = load(DataConfig(path=str(pets), validation_fraction=0.2, test=str(pets)), needs)
    assert splits.test is not None
    assert splits.validation is not None
    labels = [row["label"] for split in (splits.train, splits.validation, splits.test) for row in split]  # type: ignore[index]
    assert sorted(labels[:5]) == ["cat", "cat", "cat", "dog", "dog"]
    assert labels[5:] == ["cat", "dog"]
    assert splits.test[0]["image"] == COLOURS.tobytes()  # type: ignore[index]


def test_a_folder_of_texts_per_label(tmp_path: Path):
    for label, text in (("neg", "bad"), ("pos", "good\nfilm")):
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.txt").write_text(text)
    rows = list(read(DataConfig(), ("text", "label"), str(tmp_path)))
    assert rows == [{"text": "bad", "label": "neg"}, {"text": "good\nfilm", "label": "pos"}]
    (tmp_path / "pos" / "2.docx").write_text("x")
    with pytest.raises(
        InputError, match=r"2\.docx: neither a \.txt nor an image; expected only texts or images"
    ):
        read(DataConfig(), ("text", "label"), str(tmp_path))


def test_images_of_one_folder_have_no_label(tmp_path: Path):
    Image.fromarray(COLOURS).save(tmp_path / "a.png")
    assert len(list(read(DataConfig(), NEEDS, str(tmp_path)))) == 1
    with pytest.raises(InputError, match="no column 'label'; it has 'image'"):
        read(DataConfig(), (*NEEDS, "label"), str(tmp_path))


def test_an_empty_folder_says_what_is_expected(tmp_path: Path):
    with pytest.raises(
        InputError, match="neither one written by save_to_disk nor one with a folder of texts or"
    ):
        read(DataConfig(), ("text",), str(tmp_path))


def test_the_images_of_data_sets(tmp_path: Path):
    import datasets

    rows = [{"img": {"bytes": encoded(Image.fromarray(COLOURS)), "path": None}, "label": 1}]
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    saved = datasets.Dataset.from_list(rows, features=features)
    saved.save_to_disk(str(tmp_path / "saved"))
    saved.to_parquet(str(tmp_path / "a.parquet"))
    config = DataConfig(columns={"image": "img"})
    for name in ("saved", "a.parquet"):
        (row,) = read(config, (*NEEDS, "label"), str(tmp_path / name))
        assert row["image"] == COLOURS.tobytes()  # type: ignore[index, call-overload]
        assert row["label"] == ("dog" if name == "saved" else 1)  # type: ignore[index, call-overload]


def test_cifar_is_read_pixel_by_pixel(tmp_path: Path):
    pixels = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    planes = [picture.transpose(2, 0, 1).tobytes() for picture in pixels]
    (tmp_path / "ten.bin").write_bytes(b"\x03" + planes[0] + b"\x09" + planes[1])
    (tmp_path / "hundred.bin.gz").write_bytes(gzip.compress(b"\x13\x63" + planes[0]))
    rows = list(read(DataConfig(format="cifar10"), (*NEEDS, "label"), str(tmp_path / "ten.bin")))
    assert [(row["image"], row["label"]) for row in rows] == [  # type: ignore[index]
        (pixels[0].tobytes(), "3"),
        (pixels[1].tobytes(), "9"),
    ]
    (row,) = read(DataConfig(format="cifar100"), (*NEEDS, "label"), str(tmp_path / "hundred.bin.gz"))
    assert (row["image"], row["label"], row["height"]) == (pixels[0].tobytes(), "99", 32)  # type: ignore[index]


PNG = encoded(Image.fromarray(COLOURS))
# A head of 40000 x 40000 pixels over 24.
HEAD = PNG[12:16] + (40000).to_bytes(4, "big") * 2 + PNG[24:29]
BOMB = PNG[:12] + HEAD + zlib.crc32(HEAD).to_bytes(4, "big") + PNG[33:]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.png", b"GIF", r"a\.png: not an image \(PNG, JPEG"),
        ("a.png", PNG[:60], "a damaged image|not an image"),
        ("a.png", BOMB, "40000 x 40000 pixels, expected at most"),
        ("a.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        ("a.cifar10", b"\x80\x04\x95" + bytes(5000), "a pickle .* refused; take the binary version"),
        ("a.cifar10", bytes(3072), "record 1 has 3072 bytes of 3073"),
        ("a.cifar10", b"\x0a" + bytes(3072), r"record 1 has 3073 bytes of 3073, the first \[10\]"),
        ("a.cifar100", b"\x14\x00" + bytes(3072), r"not a file of CIFAR-100's binary version.* \[20, 0\]"),
    ],
)
def test_a_file_that_is_no_image_is_refused(tmp_path: Path, name: str, data: bytes, message: str):
    (tmp_path / name).write_bytes(data)
    kind = name.partition(".")[2]
    with pytest.raises(InputError, match=message):
        read(DataConfig(format=kind if "cifar" in kind else None), NEEDS, str(tmp_path / name))  # type: ignore[arg-type]


def test_a_gzip_bomb_is_refused_before_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polyformer.data.sources.files.EXPANDED", 2**16)
    for name, needs, data in [("a.txt.gz", ("text",), bytes(2**20)), ("a.jsonl.gz", ("text",), b"[" * 2**20)]:
        (tmp_path / name).write_bytes(gzip.compress(data))
        with pytest.raises(InputError, match=r"more than 200 times as large as its compressed file: refused"):
            read(DataConfig(), needs, str(tmp_path / name))


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polyformer.data.sources.files.LINE", 100)
    for name in ("a.csv", "a.tsv", "a.jsonl", "a.conll"):
        (tmp_path / name).write_text("text\n" * 0 + "x" * 101 + "\n")
        with pytest.raises(InputError, match=r"line 1: longer than 100 characters; split it into lines"):
            read(DataConfig(), ("text",), str(tmp_path / name))
