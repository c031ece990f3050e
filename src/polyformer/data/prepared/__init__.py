"""Text tokenized once into files that training memory-maps, for text larger than memory.

    preparing.py   documents -> blocks -> token ids by several threads -> shards, a manifest after each
    reading.py     input: the documents of many sources, the held-out documents, and the ends of blocks
    shards.py      the files of a shard, written and memory-mapped
    manifest.py    description of a folder and of its input
    folder.py      a finished folder: its splits and documents, also end to end, and checks
    text.py        a split of a folder, or of several by weights, as the rows of a run
    rows.py        packed rows by their numbers, and batches of them in a shuffled order without memory
    in_order.py    documents read in order, like `polyformer.data.segments` in memory

A folder DIR:

    manifest.json           sources, tokenizer, shards with their sizes and checksums
    tokenizer/              the tokenizer's files
    train-00000.tokens      token ids of the documents end to end, without special tokens: uint16, or uint32
    train-00000.ends        the end of each document among them: uint64
    validation-00000.*      the same for the held-out documents
"""
