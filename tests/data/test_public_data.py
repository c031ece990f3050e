"""Public data sets as they are published, where they are at hand: their counts are those that are known."""

from polyformer.data.sources.splits import DataConfig, load, read


def rows(path, needs=("text",), **options):
    """All rows of a source."""
    return list(read(DataConfig(**options), needs, path))


def texts(path, **options):
    """The texts of a source."""
    return [row["text"] for row in rows(path, **options)]


def test_wikitext2(shared_data):
    folder = shared_data("wikitext2")
    articles = texts(f"{folder}/valid.txt.gz", format="articles")
    assert len(articles) == 60
    assert "".join(articles) == "".join(texts(f"{folder}/valid.txt.gz"))
    assert len("".join(articles).encode()) == 1_121_681


def test_sst2(shared_data):
    folder = shared_data("sst2")
    data = rows(f"{folder}/train.tsv", ("text", "label"), header=("text", "label"))
    assert len(data) == 6920
    assert {row["label"] for row in data} == {"0", "1"}


def test_wnut17(shared_data):
    folder = shared_data("wnut17")
    train, dev, test = load(
        DataConfig(
            path=f"{folder}/wnut17train.conll",
            validation=f"{folder}/emerging.dev.conll",
            test=f"{folder}/emerging.test.annotated",
        ),
        ("tokens", "tags"),
    )
    assert (len(train), len(dev), len(test)) == (3394, 1009, 1287)
    assert len({tag for row in train for tag in row["tags"]}) == 13


def test_multi30k(shared_data):
    folder = shared_data("multi30k")
    data = rows(f"{folder}/val.{{en,de}}.gz", ("source", "target"))
    assert len(data) == 1014
    assert data[0]["source"] == "A group of men are loading cotton onto a truck"
