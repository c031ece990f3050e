"""What `polyformer bench all --out FILE` wrote, as a table in Markdown; of several files in turn.

polyformer bench report --files mine.json theirs.json
"""

import dataclasses

from polyformer.bench.table.records import load
from polyformer.bench.table.report import markdown
from polyformer.core.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportBench(Config):
    """Measures nothing."""

    files: tuple[str, ...]


def run(config: ReportBench) -> str:
    """Print and return the tables."""
    text = "\n\n".join(markdown(load(file)) for file in config.files)
    print(text)
    return text
