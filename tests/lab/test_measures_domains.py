"""The mixing weight in two domains, with texts that only their own store predicts."""

import gzip
from pathlib import Path

from polyformer_lab.cells import Cell
from polyformer_lab.measures.nearest_neighbours import rows_of, two_domains

ARTICLE = " = Article {0} = \n \n The house of number {0} stands in street {1} . \n \n"
VERSE = "A green bottle hangs on wall {0}, and if it falls, {0} others do too.\n"


def test_each_domain_has_a_store_of_its_own_text(tmp_path: Path):
    for name in ("train", "valid", "test"):
        text = "".join(ARTICLE.format(number, number % 3) for number in range(12))
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    book = tmp_path / "book.txt"
    book.write_text("".join(VERSE.format(number % 5) for number in range(400)))
    two_domains(tmp_path, str(tmp_path), str(book), characters=3000, held_out=300)
    train, validation = (
        "".join(rows_of(f"{tmp_path}/other/{split}.jsonl")) for split in ("train", "validation")
    )
    whole = book.read_text()
    assert whole.startswith(train)
    assert 3000 <= len(train) < 3000 + len(VERSE)
    assert 300 <= len(validation) < 300 + len(VERSE)
    assert whole.find(validation, len(whole) * 19 // 20 - len(VERSE)) > 0, (
        "the beginning of the held-out part"
    )
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    recipe = {
        "task": {"kind": "lm", "row_length": 16, "batch_tokens": 64},
        "model": {"preset": "decoder-tiny", **sizes},
        "data": {"path": f"{tmp_path}/train.jsonl", "validation": f"{tmp_path}/validation.jsonl"},
        "tokenizer": {"algorithm": "bpe", "vocab_size": 280},
        "training": {"steps": 1},
    }
    options = {"texts": str(tmp_path), "length": 16, "neighbours": 4, "tokens": 128}
    own, other = Cell((), 0, tmp_path / "run", recipe, "domain-weights", options).run()
    assert (own["domain"], other["domain"]) == ("own", "other")
    assert other["entries"] > own["entries"] > 0
    for row in (own, other):
        assert row["perplexity"] < row["none"] / 2, "the texts repeat themselves"
        assert row["weight"] > 0.5
