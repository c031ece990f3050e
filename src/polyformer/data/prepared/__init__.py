"""Text tokenized once into files that training memory-maps, for text larger than memory.

    preparing.py   documents -> blocks -> token ids by several threads -> shards, a manifest after each
    folder.py      the manifest and the shards of a folder; its splits and documents, also end to end
    rows.py        the rows of a run: packed, in a shuffled order without memory, or documents in order

A folder DIR:

    manifest.json           sources, tokenizer, shards with their sizes and checksums
    tokenizer/              the tokenizer's files
    train-00000.tokens      token ids of the documents end to end, without special tokens: uint16, or uint32
    train-00000.ends        the end of each document among them: uint64
    validation-00000.*      the same for the held-out documents
"""
