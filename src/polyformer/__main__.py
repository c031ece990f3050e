"""`python -m polyformer` is the command `polyformer`."""

import sys

from polyformer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
