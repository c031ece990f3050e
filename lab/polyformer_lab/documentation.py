"""Write docs/claims.md and docs/seeds.md: `python -m polyformer_lab.documentation [--check]`."""

import sys

from polyformer.cli.documentation import DOCS, ROOT, has_check_option, update
from polyformer_lab.catalogue import claims_page, recorded, result_pages
from polyformer_lab.citations import Citations
from polyformer_lab.statements import find_problems, read_texts, statement_pages


def main(arguments: list[str] | None = None) -> int:
    """Write the pages; with `--check` report stale pages (status 1) and write nothing.

    Rows of docs/seeds that are incomplete or cite something that does not exist are listed, with status 1.
    """
    check = has_check_option(arguments, __doc__ or "")
    results = result_pages(DOCS)
    citations = Citations(ROOT, recorded(results))
    texts = read_texts(DOCS / "seeds", citations)
    if problems := find_problems(texts, citations):
        print("\n".join(problems))
        return 1
    pages = {DOCS / "claims.md": claims_page(results)} | statement_pages(DOCS, texts, citations)
    return int(bool(update(pages, check)) and check)


if __name__ == "__main__":
    sys.exit(main())
