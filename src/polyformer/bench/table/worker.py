"""What `processes` starts: `python -m polyformer.bench.table.worker TASK`, TASK as JSON."""

import json
import sys

import torch

from polyformer.bench.table.measuring import measure
from polyformer.bench.table.rows import ROWS
from polyformer.core.files import write_json


def main(task: str) -> None:
    """Measure the row and write its record."""
    wanted = json.loads(task)
    torch.set_num_threads(wanted["threads"])
    record = measure(ROWS[wanted["row"]], wanted["instructions"], wanted["quick"])
    write_json(wanted["file"], record.to_dict())


if __name__ == "__main__":
    main(sys.argv[1])
