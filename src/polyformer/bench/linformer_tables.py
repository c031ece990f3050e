"""What Linformer's paper measured and counted (Wang et al. 2020, tables 1 and 3)."""

PAPER = {
    "time": {
        512: (1.5, 1.3),
        1024: (1.7, 1.6, 1.3),
        2048: (2.6, 2.4, 2.1, 1.3),
        4096: (3.4, 3.2, 2.8, 2.2, 1.3),
        8192: (5.5, 5.0, 4.4, 3.5, 2.1),
        16384: (8.6, 7.8, 7.0, 5.6, 3.3),
        32768: (13, 12, 11, 8.8, 5.0),
        65536: (20, 18, 16, 14, 7.9),
    },
    "memory": {
        512: (1.7, 1.5),
        1024: (3.0, 2.9, 1.8),
        2048: (6.1, 5.6, 3.6, 2.0),
        4096: (14, 13, 8.3, 4.3, 2.3),
        8192: (28, 26, 17, 8.5, 4.5),
        16384: (56, 48, 32, 16, 8),
        32768: (56, 48, 36, 18, 16),
        65536: (60, 52, 40, 20, 18),
    },
}
"""Table 3: how many times faster, or less memory, by n, for k = 128, 256, 512, 1024, 2048."""

PAPER_KS = 128, 256, 512, 1024, 2048

COMPLEXITY = """model                    per layer    sequential operations
recurrent                O(n)         O(n)
Transformer (2017)       O(n^2)       O(1)
Sparse Transformer       O(n sqrt n)  O(1)
Reformer                 O(n log n)   O(log n)
Linformer                O(n)         O(1)"""
"""Table 1."""


def published(what: str, n: int, k: int) -> float | None:
    """Table 3's entry, where it has one."""
    row = PAPER[what].get(n, ())
    return row[PAPER_KS.index(k)] if k in PAPER_KS and PAPER_KS.index(k) < len(row) else None
