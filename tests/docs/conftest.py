"""The generator of the site is no package: its folder is put on the path, behind everything else."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "docs" / "site"))
