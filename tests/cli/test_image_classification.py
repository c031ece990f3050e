"""Images from a folder per label, on the command line: from the guess to the explorer."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import polyformer
from polyformer import InputError
from polyformer.cli.main import main
from polyformer.cli.plots.explorer import explore
from polyformer.cli.plots.report import write_report
from polyformer.training.recipes.run import Run
from polyformer.training.tasks import ImageClassification

TINY = (
    *("--steps", "40", "--device", "cpu", "--model.hidden_size", "16", "--model.num_hidden_layers", "2"),
    *("--model.intermediate_size", "32", "--model.num_attention_heads", "2", "--optimizer.lr", "1e-2"),
    *("--training.reporting.log_every", "20", "--schedule.warmup", "5"),
)
CHANNELS = {"red": 0, "green": 1, "blue": 2}


def picture(label: str, seed: int) -> Image.Image:
    """Noise of 16 x 16 in the colour that the label says."""
    pixels = np.random.default_rng(seed).integers(0, 90, (16, 16, 3)).astype(np.uint8)
    pixels[..., CHANNELS[label]] += np.uint8(150)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Splits with a folder per label: PNG and JPEG files."""
    root = tmp_path_factory.mktemp("colours")
    for split, number in (("train", 8), ("validation", 3), ("test", 2)):
        for label in CHANNELS:
            (root / split / label).mkdir(parents=True)
            for i in range(number):
                seed = 1000 * len(split) + 10 * i + CHANNELS[label]
                picture(label, seed).save(root / split / label / f"{i}.{'png' if i % 2 else 'jpg'}")
    return root


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the folder."""
    out = tmp_path_factory.mktemp("runs") / "colours"
    assert main(["train", "--data", str(folder), "--out", str(out), *TINY, "--report"]) == 0
    return out


def test_a_folder_per_label_is_guessed_and_learned(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "--data", str(folder), "--out", str(tmp_path / "run"), *TINY, "--steps", "1"]) == 0
    said = capsys.readouterr().out
    for line in (
        "guessed task: classify_image, it has image and label (--task.kind)",
        f"guessed test: {folder.name}, by its name (--data.test)",
        "guessed size: the middle of each image, 16 x 16, as they are (--data.image_size '[H, W]')",
        "guessed colours: rgb, as the images are (--data.image_mode)",
        "guessed patches: 4 x 4 pixels, by the size (--model.patch_size '[H, W]')",
        "guessed patches are read by: convolutions, they have colours (--model.convolutional_stem)",
        "guessed mirror images: half of the training images, they have colours (--task.augmentation.flip)",
        "24 images of 16 x 16 with 3 labels to train on",
        "9 images held out",
    ):
        assert line in said.splitlines()
    assert "guessed validation" not in said


def test_a_run_has_learned_and_is_measured_again(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    opened = Run.open(run)
    assert opened.recipe.task.labels == ("blue", "green", "red")  # type: ignore[attr-defined]
    assert opened.facts["metrics"]["validation"]["accuracy"] == 1
    assert opened.facts["metrics"]["test"]["accuracy"] == 1
    assert main(["evaluate", str(run), "--data", str(folder / "validation"), "--device", "cpu"]) == 0
    values = capsys.readouterr().out.splitlines()[-1].split()
    assert values[2:] == ["1", "1", "0.3333"]


def test_images_of_any_size_and_colours_are_classified(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    picture("red", 1).resize((50, 30)).save(tmp_path / "wide.png")
    picture("blue", 2).save(tmp_path / "blue.JPG", "JPEG")
    picture("green", 3).convert("RGBA").save(tmp_path / "clear.png")
    names = [str(tmp_path / name) for name in ("wide.png", "blue.JPG", "clear.png")]
    assert main(["classify", str(run), *names, "--device", "cpu"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [label for label, _ in lines] == ["red", "blue", "green"]
    assert all(0.5 < float(share) <= 1 for _, share in lines)


def test_images_are_classified_in_python_as_by_the_command(run: Path, tmp_path: Path, output):
    wide = picture("red", 1).resize((50, 30))
    wide.save(tmp_path / "wide.png")
    (shown,) = output("classify", run, tmp_path / "wide.png").splitlines()
    loaded = polyformer.load(run, "cpu")
    by_path = loaded.classify(tmp_path / "wide.png")
    assert f"{by_path.label}\t{by_path.probability:.4f}" == shown
    assert by_path.probabilities.keys() == {"blue", "green", "red"} == {*loaded.labels}
    assert sum(by_path.probabilities.values()) == pytest.approx(1)
    several = loaded.predict([wide, picture("blue", 2), str(tmp_path / "wide.png")])
    assert several[0].probabilities == pytest.approx(by_path.probabilities, abs=1e-5)
    assert [result.label for result in several] == ["red", "blue", "red"]
    with pytest.raises(InputError, match=r"embed: not available for .*; this model can predict, classify"):
        loaded.embed("a text")
    with pytest.raises(InputError, match="expected an image of Pillow, or a file name"):
        loaded.classify([3])


def test_a_file_that_is_no_image_is_refused_by_name(run: Path, tmp_path: Path, complaint: Callable[..., str]):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no more")
    assert "broken.png: not an image" in complaint("classify", run, tmp_path / "broken.png")
    assert "got 'a fine film'; to evaluate a folder use polyformer evaluate" in complaint(
        "classify", run, "a fine film"
    )
    assert "nowhere.png: no such file" in complaint("classify", run, tmp_path / "nowhere.png")
    assert "--pair: only for models of texts" in complaint("classify", run, "a.png", "--pair", "b")


def test_folders_without_labels_or_images_are_refused(
    folder: Path, tmp_path: Path, complaint: Callable[..., str]
):
    single = tmp_path / "single"
    shutil.copytree(folder / "train" / "red", single / "red")
    refused = complaint("train", "--data", single, *TINY)
    assert "every training image has the same one, 'red'; two or more are needed; put images" in refused
    shutil.copytree(folder / "train" / "blue", single / "blue")
    (single / "blue" / "0.jpg").write_bytes((single / "blue" / "0.jpg").read_bytes()[:300])
    assert f"{single}/blue/0.jpg: not an image (PNG, JPEG, WEBP, BMP, GIF, TIFF), or a" in complaint(
        "train", "--data", single, *TINY
    )
    unseen = tmp_path / "unseen"
    shutil.copytree(folder, unseen)
    shutil.move(unseen / "train" / "red", tmp_path / "red")
    assert "label: 'red' was not seen in training, which had 'blue', 'green'; correct" in complaint(
        "train", "--data", unseen, *TINY
    )
    (tmp_path / "empty").mkdir()
    assert "cannot tell what to train on in this directory, which has nothing" in complaint(
        "train", "--data", tmp_path / "empty", *TINY
    )


def test_images_of_several_sizes_are_brought_to_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mixed = tmp_path / "mixed"
    shutil.copytree(folder / "train", mixed)
    picture("red", 5).resize((40, 20)).save(mixed / "red" / "0.jpg")
    out = tmp_path / "run"
    options = (*TINY, "--steps", "1", "--model.patch_size", "[16,16]")
    assert main(["train", "--data", str(mixed), "--out", str(out), *options]) == 0
    assert (
        "guessed size: the middle of each image, 64 x 64, they have several sizes" in capsys.readouterr().out
    )
    config = Run.open(out).model("cpu").config
    assert (config.image_size, config.patch_size) == ((64, 64), (16, 16))  # type: ignore[attr-defined]


def test_a_checkpoint_is_fine_tuned_with_its_size_and_normalization(
    run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], complaint: Callable[..., str]
):
    two, out = tmp_path / "two", tmp_path / "run"
    for label in ("red", "blue"):
        shutil.copytree(folder / "train" / label, two / label)
    options = ("--steps", "2", "--device", "cpu", "--pretrained", str(run))
    assert main(["train", "--data", str(two), "--out", str(out), *options]) == 0
    said = capsys.readouterr().out
    assert f"guessed size: the middle of each image, 16 x 16, as {run} reads" in said
    assert "newly initialized: head.output.bias, head.output.weight" in said
    before, after = (Run.open(path).model("cpu").config for path in (run, out))
    assert (after.mean, after.std) == (before.mean, before.std)  # type: ignore[attr-defined]
    assert after.head.num_labels == 2  # type: ignore[attr-defined]
    larger = ("--data.image_size", "[32,32]")
    assert "the checkpoint takes images of 16 x 16 x 3, but the data has 32 x 32 x 3; set" in complaint(
        "train", "--data", two, *options, *larger
    )


def test_a_checkpoint_of_transformers_is_used_and_fine_tuned_with_other_labels(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=16, patch_size=8, id2label={0: "cat", 1: "dog"}, **sizes)
    vit, image = str(tmp_path / "vit"), str(folder / "test" / "red" / "0.jpg")
    transformers.ViTForImageClassification(config).save_pretrained(vit)
    assert main(["classify", vit, image, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.split()[0] in ("cat", "dog")
    assert main(["explore", vit, image, "--out", str(tmp_path / "page.html"), "--device", "cpu"]) == 0
    options = ("--steps", "1", "--device", "cpu", "--out", str(tmp_path / "run"))
    assert main(["train", "--data", str(folder), "--pretrained", vit, *options]) == 0
    assert "newly initialized: head.output.bias, head.output.weight" in capsys.readouterr().out


def test_the_report_shows_what_concerns_a_model_of_images(run: Path):
    page = (run / "report.html").read_text()
    assert '<table class="confusion">' in page
    assert re.search(r'<th scope="row">blue</th><td style="--share: 1.000" class=right>3</td>', page)
    assert page.count("data:image/png;base64,") == 9
    assert "<dt>speed</dt>" in page
    assert "images a second" in page
    assert "nearest class mean" in page
    for foreign in ("tokens a second", "Cost of attention", 'id="patterns"', 'id="samples"'):
        assert foreign not in page


def test_the_report_shows_mistakes_in_validation_rows(run: Path, folder: Path, tmp_path: Path):
    from polyformer.cli.plots.report.examples import examples
    from polyformer.cli.plots.report.mistakes import read_held_out

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    swapped = tmp_path / "swapped"
    shutil.copytree(folder / "test" / "red", swapped / "blue")
    shutil.copytree(folder / "test" / "blue", swapped / "red")
    opened = Run.open(copy)
    recipe = opened.recipe.override("validation", str(swapped))
    (copy / "recipe.yaml").write_text(recipe.to_yaml())
    section = examples(read_held_out(Run.open(copy), opened.model("cpu")))
    assert "Of 4 rows of the validation data, 4 are labelled wrong" in section
    assert section.count("data:image/png;base64,") == 4
    shares = [float(share) for share in re.findall(r'alt="[^"]*, taken for \w+ \(([\d.]+)\)"', section)]
    assert shares == sorted(shares, reverse=True)
    assert 'alt="red (0.' in section
    shutil.rmtree(swapped)
    content = write_report(Run.open(copy)).read_text()
    assert "The validation data of the run cannot be read: " in content


def page_data(path: Path) -> Any:
    """The header of an explorer's page."""
    return json.loads(path.read_text().partition('id="explorer-data">')[2].partition("</script>")[0])


def test_patches_are_explored(run: Path, folder: Path, tmp_path: Path):
    out = tmp_path / "page.html"
    image = str(folder / "test" / "red" / "0.jpg")
    assert main(["explore", str(run), image, "--out", str(out), "--device", "cpu"]) == 0
    assert '"class"' in out.read_text()
    assert '"row 3 col 3"' in out.read_text()
    model, task = Run.open(run).model("cpu"), Run.open(run).task_of(ImageClassification)
    with Image.open(image) as opened:
        pixels = np.asarray(opened)
    (shares,) = task.classify(model, [{"image": pixels.tobytes(), "height": 16, "width": 16}])
    said = page_data(out)["runs"][0]["prediction"]
    assert said["label"] == ""
    assert [each["name"] for each in said["labels"]] == sorted(shares, key=lambda name: -shares[name])
    assert [each["probability"] for each in said["labels"]] == pytest.approx(sorted(shares.values())[::-1])
    assert said["labels"][0]["name"] == "red"


def test_the_label_of_a_row_of_the_data_is_said(run: Path, tmp_path: Path):
    out = tmp_path / "page.html"
    assert main(["explore", str(run), "--row", "2", "--out", str(out), "--device", "cpu"]) == 0
    assert page_data(out)["runs"][0]["prediction"]["label"] == "blue"
    from polyformer.models.architectures import load_pretrained

    model: Any = load_pretrained(run)
    black = np.zeros((16, 16, 3), np.uint8)
    without, named = explore(model, black), explore(model, black, labels=("blue", "<green>", "red"))
    assert "LABEL_2" in without.html
    assert "\\u003cgreen>" in named.html


def test_a_classifier_of_transformers_predicts_in_the_explorer(folder: Path, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=16, patch_size=8, id2label={0: "cat", 1: "dog"}, **sizes)
    classifier, vit = transformers.ViTForImageClassification(config).eval(), tmp_path / "vit"
    classifier.save_pretrained(vit)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(vit)
    out, image = tmp_path / "page.html", str(folder / "test" / "red" / "0.jpg")
    assert main(["explore", str(vit), image, "--transformers", "--out", str(out), "--device", "cpu"]) == 0
    labels = page_data(out)["runs"][0]["prediction"]["labels"]
    assert {each["name"] for each in labels} == {"cat", "dog"}
    assert sum(each["probability"] for each in labels) == pytest.approx(1)
    assert len(page_data(out)["runs"][0]["tokens"]["encoder"]) == 5
