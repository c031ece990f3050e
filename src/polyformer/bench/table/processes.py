"""A row in a process of its own, under an instruction set: what one row leaves behind disturbs no other, and
a library that ends its process ends that row alone."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from polyformer.bench.table.records import Record, today
from polyformer.core.files import read_json

INSTRUCTIONS: dict[str, dict[str, str]] = {
    "default": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "CT2_FORCE_CPU_ISA": "AVX2",
    },
}
"""What limits torch, its libraries and CTranslate2 to some instructions, read when they are loaded. llama.cpp
has no such limit: it always runs what it was compiled for."""


def in_process(row: str, instructions: str, quick: bool, limit: float) -> Record:
    """The row's record, with the reason in it where its process failed or took more than `limit` seconds."""
    with tempfile.TemporaryDirectory(prefix="polyformer-bench-") as folder:
        file = Path(folder, "record.json")
        task = {
            "row": row,
            "instructions": instructions,
            "quick": quick,
            "threads": torch.get_num_threads(),
            "file": str(file),
        }
        words = [sys.executable, "-m", "polyformer.bench.table.worker", json.dumps(task)]
        # torch's compiler keeps its code without saying for which instructions: others' code crashes.
        compiled = {"TORCHINDUCTOR_CACHE_DIR": folder} if INSTRUCTIONS[instructions] else {}
        environment = os.environ | INSTRUCTIONS[instructions] | compiled
        try:
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, errors="replace", timeout=limit
            )
        except subprocess.TimeoutExpired:
            return _failed(row, instructions, f"not done after {limit:g} seconds")
        if done.returncode or not file.exists():
            return _failed(row, instructions, _reason(done))
        return Record.from_dict(read_json(file, dict))


def _failed(row: str, instructions: str, reason: str) -> Record:
    return Record(row=row, instructions=instructions, date=today(), failure=reason)


def _reason(done: "subprocess.CompletedProcess[str]") -> str:
    """The last line of what it said: an exception's, or the signal that ended it."""
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit status {done.returncode}"
