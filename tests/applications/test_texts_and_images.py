"""A model of texts and images by its commands: vectors of both, and images classified by names of labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import polyformer
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.models.architectures import TowersConfig, TwoTowers

WORDS = ["<pad>", "<start>", "<end>", "<unk>", "a", "photo", "of", "cat", "dog", "garden", "."]


@pytest.fixture(scope="module", params=[False, True], ids=["softmax", "sigmoid"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer of words, which pads texts or masks their padding."""
    torch.manual_seed(0)
    config: Any = TowersConfig.examples()[0]
    sigmoid = request.param
    for name, value in {"vocab_size": len(WORDS), "max_position_embeddings": 12, "special.pad": 0}.items():
        config = config.override(f"text.{name}", value)
    config = config.override("objective", "sigmoid" if sigmoid else "softmax").override("pads_texts", sigmoid)
    config = config.override("image.image_size", [8, 8]).override("image.num_channels", 3)
    path = tmp_path_factory.mktemp("towers")
    TwoTowers(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    words.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three images of different sizes."""
    path = tmp_path_factory.mktemp("photos")
    numbers = np.random.default_rng(0)
    for name, shape in {"b.png": (16, 8, 3), "a.png": (8, 8, 3), "c.jpg": (9, 31, 3)}.items():
        Image.fromarray(numbers.integers(0, 256, shape, dtype=np.uint8)).save(path / name)
    return path


def vectors(folder: Path, photos: Path) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Of "a photo of a cat." and "... dog." and of a.png and b.png, by the model itself."""
    model: Any = polyformer.from_pretrained(folder)
    ids = torch.tensor([[1, 4, 5, 6, 4, animal, 10, 2] for animal in (7, 8)])
    if model.config.pads_texts:
        ids = torch.nn.functional.pad(ids, (0, 4))
    tall = Image.open(photos / "b.png")
    pixels = [Image.open(photos / "a.png"), tall.crop((0, 4, 8, 12))]
    bytes_of = torch.from_numpy(np.stack([np.asarray(image) for image in pixels]))
    with torch.no_grad():
        return model.encode_texts(ids), model.encode_images(model.image.normalize(bytes_of)), model


def test_images_are_classified_by_names_of_labels(folder: Path, photos: Path):
    texts, images, model = vectors(folder, photos)
    loaded = polyformer.load(folder)
    results = loaded.classify(photos, labels=["cat", "dog"])  # type: ignore[call-arg]
    assert len(results) == 3
    shares = model.probabilities(texts, images)
    for result, row in zip(results, shares.tolist()):
        assert result.probabilities == pytest.approx(dict(zip(("cat", "dog"), row)), abs=1e-5)
    single: Any = loaded.classify(str(photos / "a.png"), labels=["cat", "dog"])  # type: ignore[call-arg]
    assert single.probabilities == pytest.approx(results[0].probabilities, abs=1e-5)


def test_texts_and_images_have_vectors(folder: Path, photos: Path):
    texts, images, _ = vectors(folder, photos)
    loaded = polyformer.load(folder)
    assert loaded.can == ("predict", "classify", "embed")
    of_texts = loaded.embed(["a photo of a cat.", "a photo of a dog."])
    np.testing.assert_allclose(of_texts, texts.numpy(), atol=1e-5)
    np.testing.assert_allclose(loaded.embed("a photo of a dog."), texts[1].numpy(), atol=1e-5)
    np.testing.assert_allclose(loaded.embed([photos / "a.png"])[0], images[0].numpy(), atol=1e-5)
    np.testing.assert_allclose(loaded.embed(Image.open(photos / "b.png")), images[1].numpy(), atol=1e-5)


def test_commands(folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import pyarrow.parquet as parquet

    _, images, _ = vectors(folder, photos)
    main(["classify", str(folder), str(photos), "--labels", "cat, dog"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert {line.split("\t")[0] for line in lines} <= {"cat", "dog"}
    main(["embed", str(folder), str(photos), "--out", str(tmp_path / "photos.parquet")])
    table = parquet.read_table(tmp_path / "photos.parquet").to_pydict()
    assert table["id"] == [str(photos / name) for name in ("a.png", "b.png", "c.jpg")]
    np.testing.assert_allclose(table["vector"][:2], images.numpy(), atol=1e-5)
    (tmp_path / "texts.txt").write_text("a photo of a cat.\na dog\n")
    main(["embed", str(folder), str(tmp_path / "texts.txt"), "--out", str(tmp_path / "texts.parquet")])
    assert len(parquet.read_table(tmp_path / "texts.parquet")) == 2


def test_labels_templates_and_images_that_are_missing_are_named(folder: Path, photos: Path, tmp_path: Path):
    loaded: Any = polyformer.load(folder)
    with pytest.raises(InputError, match="labels: expected the names of two or more labels, got "):
        loaded.classify(photos)
    with pytest.raises(InputError, match=r"template: expected a text with \{\} for the label"):
        loaded.classify(photos, labels=["cat", "dog"], template="a photo")
    with pytest.raises(InputError, match="IMAGE: expected an image of Pillow, a folder, or a file name"):
        loaded.classify("a dull text", labels=["cat", "dog"])
    with pytest.raises(InputError, match="a folder without images"):
        loaded.classify(tmp_path, labels=["cat", "dog"])
    with pytest.raises(InputError, match="either only texts or only images"):
        loaded.embed(["a cat", str(photos / "a.png")])
