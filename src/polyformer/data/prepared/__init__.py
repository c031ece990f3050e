"""Text tokenised once into files that training maps into memory, for more text than memory holds.

    preparing.py   documents -> blocks -> token ids by several threads -> shards, a manifest after each
    reading.py     what to read: the documents of many sources, those held out, and where a block ends
    shards.py      the files of a shard, written and mapped
    manifest.py    what a folder holds, and of what it was made
    folder.py      a finished folder opened: its splits and documents, and what is wrong with it
    text.py        a split of a folder, or of several by weights, as the rows of a run
    framed.py      its documents end to end, each between special tokens, read from any place
    rows.py        packed rows by their numbers, and batches of them in a shuffled order that takes no memory
    in_order.py    documents read in order, as `polyformer.data.segments` has them in memory

A folder DIR:

    manifest.json           sources, tokenizer, shards with their sizes and checksums
    tokenizer/              the tokenizer's files
    train-00000.tokens      token ids of the documents end to end, no special ones: uint16, or uint32
    train-00000.ends        where each document ends among them: uint64
    validation-00000.*      the same of the documents held out
"""
