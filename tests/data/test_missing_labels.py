"""Rows without a label: they are left out and counted."""

from pathlib import Path

import pandas as pd
import pytest
from test_first_contact import PLAIN, PLAIN_ROWS, lines, parquet

from polyformer.core.errors import Caution
from polyformer.data import DataConfig, load, read
from polyformer.data.formats.columns import KINDS
from polyformer.data.formats.guess import guess

# name: content. All are read as PLAIN_ROWS, without the two rows that have no label.
UNLABELLED: dict[str, str | bytes] = {
    "empty.csv": PLAIN + "so long,\nlong, \n",
    "empty-first.csv": PLAIN.replace("\n", "\nso,\nlong,\n", 1),
    "empty-headless.csv": PLAIN.partition("\n")[2] + "so,\nlong,\n",
    "empty.tsv": PLAIN.replace(",", "\t") + "so long\t\nlong\t \n",
    "empty-names.csv": (PLAIN + "so,\nlong,\n").replace("text,label", "Review,Sentiment"),
    "missing.jsonl": lines(*PLAIN_ROWS, {"text": "so", "label": None}, {"text": "a", "label": ""}),
    "nan.jsonl": lines(*PLAIN_ROWS, {"text": "so", "label": float("nan")}, {"text": "a", "label": ""}),
    "empty.parquet": parquet(pd.DataFrame([*PLAIN_ROWS, {"text": "so", "label": None}, {"text": "a"}])),
}


@pytest.mark.parametrize("name", UNLABELLED)
def test_rows_without_a_label_are_left_out(name: str, tmp_path: Path):
    content, path = UNLABELLED[name], tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    guessed = guess(str(path), {})
    with pytest.warns(Caution, match=f"{name}: 2 rows without a label are left out$") as warned:
        rows = list(read(DataConfig.from_dict(guessed.data), KINDS["classify"], str(path)))
    assert guessed.kind == "classify"
    assert rows == PLAIN_ROWS
    assert len(warned) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_without_a_label_are_in_no_split(streaming: bool, tmp_path: Path):
    (tmp_path / "empty.csv").write_text(PLAIN + "so long,\n")
    config = DataConfig(path=str(tmp_path / "empty.csv"), streaming=streaming, validation_fraction=0.5)
    with pytest.warns(Caution, match="empty.csv: 1 row without a label is left out$"):
        texts = [[dict(row)["text"] for row in rows or ()] for rows in load(config, KINDS["classify"])]
    assert sorted(texts[0] + texts[1]) == sorted(row["text"] for row in PLAIN_ROWS)
    assert len(texts[1]) == 2
