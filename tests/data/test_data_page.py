"""docs/data.md keeps its word: its commands run on its files, and say what the page says."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyformer import InputError
from polyformer.cli.main import main
from polyformer.data.formats.columns import content_roles, is_heading, roles
from polyformer.data.formats.guess import guess
from polyformer.models.presets import create_model
from polyformer.training.recipes.guessed import guessed_recipe

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
FILES = {name: text for _, name, text in BLOCKS if name}
TINY = ("--steps", "1", "--device", "cpu", "--model.hidden_size", "16", "--training.reporting.log_every", "1")


def said() -> dict[str, list[str]]:
    """What the page says of each command."""
    commands: dict[str, list[str]] = {}
    for _, _, text in (block for block in BLOCKS if block[0] == "console"):
        for line in text.splitlines():
            if line.startswith("$ "):
                command = line.removeprefix("$ ")
                commands[command] = []
            else:
                commands[command].append(line)
    return commands


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, and those that it only names."""
    import datasets

    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin1.txt").write_bytes("Vögel".encode("latin-1"))
    (tmp_path / "notes.docx").write_bytes(b"PK")
    for folder, names in {"corpus": ("chapter.txt", "README"), "unclear": ("a.csv", "b.txt")}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("a few words\n" * 30)
    (tmp_path / "broken.csv").write_text("text,label\na,1\nb\n")
    (tmp_path / "short.en").write_text("Go.\n")
    (tmp_path / "short.vi").write_text("Đi.\nTôi thắng!\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    rows = [{"text": f"film {i}", "label": "good" if i % 2 else "bad"} for i in range(6)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    for folder in ("reviews", "mixed"):
        for label in ("good", "bad"):
            (tmp_path / folder / label).mkdir(parents=True)
            for i in range(3):
                (tmp_path / folder / label / f"{i}.txt").write_text(f"a {label} film")
    (tmp_path / "mixed" / "good" / "2.docx").write_bytes(b"PK")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 40, 50, 3), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        folder = tmp_path / "pets" / ("cat" if i % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture[: 30 + i]).save(folder / f"{i}.{'png' if i < 3 else 'jpg'}")
    steps = np.random.default_rng(0).normal(size=(40, 3))
    arrays = {"observations": steps, "actions": steps[:, :2], "rewards": steps[:, 2]}
    np.savez(tmp_path / "walker.npz", **arrays, terminals=np.arange(40) % 8 == 7)
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073 * 3))
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x04\x95" + bytes(5000))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no more")
    return tmp_path


def test_every_command_of_the_page_does_what_it_says(page: Path, capsys: pytest.CaptureFixture[str]):
    ran, wrong = 0, {}
    for command, lines in said().items():
        words = shlex.split(command)
        assert words[:2] == ["polyformer", "train"]
        images = "--data.image" in command
        small = ["--model.num_attention_heads", "2"] if images else ["--tokenizer.vocab_size", "300"]
        fails = lines[0].startswith("error: ")
        capsys.readouterr()
        status = main([*words[1:], *TINY, *small])
        out, error = capsys.readouterr()
        if status != (2 if fails else 0):
            wrong[command] = error
        text = (error if fails else out).replace(f"{page}/", "")
        if any(line not in text for line in lines):
            wrong[command] = text
        ran += not fails
    assert not wrong
    assert ran >= 14


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["Sentence", "Label", "id"], ("classify", {"text": "Sentence", "label": "Label"})),
        (
            ["idx", "question", "sentence", "label"],
            ("classify_pair", {"text": "question", "pair": "sentence", "label": "label"}),
        ),
        (
            ["question", "context", "answers", "id"],
            ("qa", {"question": "question", "context": "context", "answers": "answers"}),
        ),
        (["vi", "en"], ("translate", {"source": "vi", "target": "en"})),
        (["words", "ner"], ("tag", {"tokens": "words", "tags": "ner"})),
        (
            ["states", "actions", "rewards", "infos"],
            ("act", {"observations": "states", "actions": "actions", "rewards": "rewards"}),
        ),
        (["text"], ("lm", {"text": "text"})),
        (["img", "label"], ("classify_image", {"image": "img", "label": "label"})),
        (["image", "caption"], ("image", {"image": "image"})),
        (["a", "b"], None),
    ],
)
def test_columns_by_their_names(names: list[str], expected: object):
    assert roles(names) == expected


def test_columns_by_their_content():
    films = [["a fine film", "1"], ["dull", "0"], ["fine", "1"], ["so long", "0"]]
    assert content_roles(films) == ["text", "label"]
    assert content_roles([row[::-1] for row in films]) == ["label", "text"]
    tatoeba = [
        [f"Go {i}.", f"Đi {i}.", f"CC-BY 2.0 (France) Attribution: tatoeba.org #{i}"] for i in range(4)
    ]
    assert content_roles(tatoeba) == ["source", "target", "credit2"]
    assert not is_heading(films)
    assert is_heading([["phrase", "mood"], *films])
    assert is_heading([["text", "x"], ["a", "b"]])


def test_stated_options_are_not_guessed(page: Path):
    assert guess("vie.txt", {"format": "lines"}).kind == "lm"
    assert guess("reviews.csv", {"columns": {"text": "review"}}, "lm").data == {"path": "reviews.csv"}
    recipe, _ = guessed_recipe("reviews.csv", None, {"task.kind": "lm"})
    assert recipe["task"]["kind"] == "lm"
    recipe, _ = guessed_recipe("qqp.tsv", None, {})
    assert recipe["task"]["kind"] == "classify_pair"
    recipe, _ = guessed_recipe("reviews.csv", None, {}, pretrained="CHECKPOINT")
    assert recipe["optimizer"]["lr"] == 3e-5


def test_texts_are_as_long_as_the_model_reads(page: Path):
    recipe, lines = guessed_recipe("reviews.csv", None, {"model": "longformer-base"})
    assert recipe["task"]["max_length"] == 4096
    assert recipe["task"]["too_long"] == "cut"
    assert "guessed max_length: 4096, as the model reads texts of 4096 tokens (--task.max_length)" in lines
    changes = {"model": "longformer-base", "task.batch_tokens": 2048}
    assert guessed_recipe("reviews.csv", None, changes)[0]["task"]["max_length"] == 2048
    create_model("longformer-tiny", max_position_embeddings=1000).save_pretrained("long")
    assert guessed_recipe("reviews.csv", None, {}, "long")[0]["task"]["max_length"] == 1000
    for stated in ({}, {"model": "bert-base"}, {"model": "longformer-base", "task.max_length": 99}):
        assert "max_length" not in guessed_recipe("reviews.csv", None, stated)[0]["task"]


def test_held_out_rows_are_those_of_the_recipe(page: Path):
    _, lines = guessed_recipe("pets", None, {"task.kind": "image"})
    (line,) = [line for line in lines if line.startswith("guessed validation")]
    assert (
        line == "guessed validation: 10% of its rows (and 10% as test), for it has none (--data.validation)"
    )
    _, lines = guessed_recipe("reviews.csv", None, {"data.validation_fraction": 0.125})
    assert "guessed validation: 12.5% of its rows, for it has none (--data.validation)" in lines
    _, lines = guessed_recipe("pets", None, {"task.kind": "image", "data.test_fraction": 0.0})
    assert "guessed validation: 10% of its rows, for it has none (--data.validation)" in lines


def test_splits_beside_a_file_and_in_a_directory(tmp_path: Path):
    for name in ("train.tsv", "dev.tsv", "test.tsv"):
        (tmp_path / name).write_text("text\tlabel\na\t1\nb\t0\n")
    expected = {
        "path": f"{tmp_path}/train.tsv",
        "validation": f"{tmp_path}/dev.tsv",
        "test": f"{tmp_path}/test.tsv",
    }
    assert guess(str(tmp_path / "train.tsv"), {}).data == expected
    assert guess(str(tmp_path), {}).data == expected
    folder = tmp_path / "parallel"
    folder.mkdir()
    for name in ("train.en.gz", "train.vi.gz", "valid.en", "valid.vi"):
        (folder / name).write_bytes(b"a\n")
    guessed = guess(str(folder), {})
    assert guessed.data == {"path": f"{folder}/train.{{en,vi}}.gz", "validation": f"{folder}/valid.{{en,vi}}"}
    assert guessed.kind == "translate"
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a.xyz").touch()
    with pytest.raises(
        InputError, match=r"cannot tell what to train on in this directory, which has a\.xyz; name a"
    ):
        guess(str(tmp_path / "odd"), {})


def test_images_of_several_sizes_are_scaled_and_mixed_ones_coloured(page: Path):
    (page / "pets" / "cat" / "9.png").unlink(missing_ok=True)
    Image.new("L", (8, 8)).save(page / "pets" / "cat" / "0.png")
    recipe, lines = guessed_recipe("pets", None, {"task.kind": "image"})
    assert recipe["data"]["image_size"] == [32, 32]
    assert recipe["data"]["image_mode"] == "rgb"
    assert recipe["model"]["position"]["shape"] == [32, 32, 3]
    said = "guessed size: the middle of each image, 32 x 32, they have several sizes"
    assert any(line.startswith(said) for line in lines)
