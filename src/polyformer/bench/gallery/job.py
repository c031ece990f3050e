"""One run of a gallery in a process of its own: `python -m polyformer.bench.gallery.job`.

The module's name and its settings come as a line of JSON on standard input, which stays open: when it
closes, the parent is gone, however it went, and the process ends too, so that nobody writes where a later
call goes on.
"""

import json
import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from polyformer.bench.machine import code_version
from polyformer.core.errors import InputError
from polyformer.core.files import write_json
from polyformer.ops.tuning.machine import processor

FACTS = "job.json"
"""The file beside a run's record: when, where and of which code it was, and how long its last call took."""

ORPHANED = 3
"""The exit status of a process whose parent is gone."""


def main() -> int:
    """Run; returns the exit status, 2 for what an `InputError` says."""
    import torch

    from polyformer.bench.gallery.jobs import measurables

    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    (own,) = measurables([order["name"]])
    start = time.monotonic()
    try:
        own.run(own.settings.from_dict(order["settings"]))
    except InputError as error:
        print(f"polyformer: {error}", flush=True)
        return 2
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "code": code_version(),
        "seconds": round(time.monotonic() - start, 1),
    }
    write_json(Path(order["settings"]["out"]) / FACTS, facts)
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
