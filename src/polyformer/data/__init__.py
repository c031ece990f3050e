"""Text in, batches out: sources -> tokenizer -> packed or paired rows -> batches (with corruptions on the way).

    splits = load(DataConfig(path="reviews.csv"), needs=("text", "label"))      # rows of plain values
    tokenizer = Tokenizer.build(TokenizerConfig(vocab_size=8192), splits.train["text"])
    rows = list(pack((tokenizer.encode(row["text"]) for row in splits.train), length=256))
    batches = Batches(rows, partial(by_rows, batch_size=32), Collate(tokenizer.pad_id), seed=1)
    for position, batch in batches.epoch(0): ...
"""
