"""Write docs/claims.md: `python -m polyformer_lab.documentation [--check]`."""

import sys

from polyformer.cli.documentation import DOCS, has_check_option, update
from polyformer_lab.catalogue import claims_page, result_pages


def main(arguments: list[str] | None = None) -> int:
    """Write the page; with `--check` report whether it is stale (status 1) and write nothing."""
    check = has_check_option(arguments, __doc__ or "")
    page = claims_page(result_pages(DOCS))
    return int(bool(update({DOCS / "claims.md": page}, check)) and check)


if __name__ == "__main__":
    sys.exit(main())
