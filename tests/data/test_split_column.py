"""Tables with a column `split`: rows for training, validation and test in one file."""

from pathlib import Path

import pytest
from test_first_contact import FILMS, FRAME, PLAIN, lines, parquet, table

from polyformer import InputError
from polyformer.data import DataConfig, load, read
from polyformer.data.formats.columns import KINDS
from polyformer.data.formats.guess import guess
from polyformer.training.recipes.guessed import for_another_source, guessed_recipe
from polyformer.training.recipes.recipe import with_data
from polyformer.training.recipes.sizes import measured_amount

HALVES = ["train", "train", "Dev", "train", "test", "train"]
PARTED = FRAME.assign(split=HALVES)

# name: content. The rows of FILMS are for training, validation and test as HALVES says.
PARTED_TABLES: dict[str, str | bytes] = {
    "parts.csv": table(PARTED, index=False),
    "parts-index.csv": table(PARTED),
    "parts.tsv": table(PARTED, sep="\t", index=False),
    "parts.jsonl": lines(*PARTED.to_dict("records")),
    "parts.parquet": parquet(PARTED),
    "parts-unicode.txt": table(PARTED, sep="\t", index=False).encode("utf-16"),
    "parts-names.csv": table(PARTED.rename(columns={"text": "Review", "split": "Split"}), index=False),
    "parts-upper.csv": table(FRAME.assign(split=[half.upper() for half in HALVES]), index=False),
    "parts-words.csv": table(
        FRAME.assign(split=["training", "Train ", "valid", "train", "testing", "train"]), index=False
    ),
}


def parts_of(config: DataConfig) -> list[list[object]]:
    """The rows for training, validation and test."""
    return [list(rows or ()) for rows in load(config, KINDS["classify"])]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file with all three parts."""
    (tmp_path / "parts.csv").write_text(table(PARTED))
    return str(tmp_path / "parts.csv")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", PARTED_TABLES)
def test_a_column_of_parts(name: str, streaming: bool, tmp_path: Path):
    content = PARTED_TABLES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    guessed = guess(str(tmp_path / name), {})
    config = DataConfig.from_dict({**guessed.data, "streaming": streaming})
    named = [[row for row, half in zip(FILMS, HALVES) if half == part] for part in ("train", "Dev", "test")]
    assert parts_of(config) == named
    column = guessed.data["split"]
    line = f"guessed split: train, validation, test, by the column '{column}' (--data.split null)"
    assert line in guessed.said
    assert not [said for said in guessed.said if "guessed validation" in said or "guessed test" in said]
    everything = guess(str(tmp_path / name), {"split": None}).data
    assert not {"split", "validation", "test"} & {*everything}
    assert list(read(DataConfig.from_dict(everything), KINDS["classify"], str(tmp_path / name))) == FILMS


def test_a_column_of_two_parts_holds_out_the_third(tmp_path: Path):
    frame = FRAME.assign(part=["train"] * 4 + ["test"] * 2)
    (tmp_path / "two.csv").write_text(table(frame))
    guessed = guess(
        str(tmp_path / "two.csv"), {"split": "part"}, "classify", lambda kind: {"test_fraction": 0.1}
    )
    config = DataConfig.from_dict({**guessed.data, "validation_fraction": 0.25})
    assert parts_of(config) == [
        [FILMS[0], FILMS[2], FILMS[3]],
        [FILMS[1]],
        FILMS[4:],
    ]
    assert "guessed validation: 5% of its rows, for it has none (--data.validation)" in guessed.said


def test_an_own_validation_source_replaces_that_of_the_column(path: str, tmp_path: Path):
    other = str(tmp_path / "other.csv")
    Path(other).write_text(PLAIN)
    guessed = guess(path, {"validation": other})
    config = DataConfig.from_dict({**guessed.data, "validation": other})
    assert [*map(len, parts_of(config))] == [4, 4, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PLAIN, r"row 1: no column 'split', which split names; it has 'text', 'label'"),
        (
            "text,label,split\na,b,dev\nc,d,test\n",
            "no row has 'train' in the column 'split'; name another train",
        ),
        (
            "text,label,split\na,b,train\nc,d,\n",
            "row 2: column 'split' holds '', expected train, validation or",
        ),
        (
            "text,label,split\na,b,dev\nc,,train\n",
            r"parts.csv \(train rows\): column 'label' is empty",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(content: str, message: str, tmp_path: Path):
    (tmp_path / "parts.csv").write_text(content)
    path = str(tmp_path / "parts.csv")
    with pytest.raises(InputError, match=message):
        read(DataConfig(path=path, split="split"), KINDS["classify"], path)


def test_a_recipe_reads_the_parts_unless_the_column_is_turned_off(path: str):
    recipe, said = guessed_recipe(path, None, {})
    assert recipe["data"]["validation"] == recipe["data"]["test"] == path
    assert [line for line in said if line.startswith("guessed split: train, validation, test")]
    assert not {"split", "validation"} & {*guessed_recipe(path, None, {"data.split": None})[0]["data"]}


def test_the_amount_of_data_is_that_of_training(path: str):
    data = guess(path, {}).data
    assert measured_amount(data, "classify").rows == 4
    assert measured_amount({**data, "split": None}, "classify").rows == 6


def test_another_source_has_its_own_parts(path: str, tmp_path: Path):
    run = DataConfig.from_dict(guess(path, {}).data)
    (tmp_path / "two.csv").write_text(table(FRAME.assign(split=["train", "test"] * 3)))
    (tmp_path / "plain.csv").write_text(PLAIN)
    two, notes = for_another_source(run, str(tmp_path / "two.csv"), {}, "classify")
    assert (two.split, two.validation, two.test) == ("split", None, two.path)
    assert [note for note in notes if note.startswith("guessed split: train, test")]
    plain, _ = for_another_source(run, str(tmp_path / "plain.csv"), {}, "classify")
    assert (plain.split, plain.validation, plain.test) == (None, None, None)
    off, _ = for_another_source(run, str(tmp_path / "two.csv"), {"split": None}, "classify")
    assert (off.split, off.test) == (None, None)


def test_a_moved_table_keeps_its_parts(path: str):
    moved = with_data(guess(path, {}).data, "elsewhere.csv")
    assert {moved[role] for role in ("path", "validation", "test")} == {"elsewhere.csv"}
    assert moved["split"] == "split"
