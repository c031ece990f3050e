"""Kills a process at a chosen operation on the files of a folder: open, write, fsync, rename, unlink, ..."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyformer.core import files

AUDITED = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
RANDOM = re.compile(r"\.[0-9a-f]{8}\.partial")


class FaultPoints:
    """Counts the operations that change `folder`, by name and in order; the process dies at number `die_at`.

    A name is the operation and the file, such as "rename .recipe.yaml.partial". It dies before the operation,
    at "torn" in the middle of it: half of the file is written. `report` gets the name just before.
    """

    def __init__(self, folder: Path, die_at: int, report: Callable[[str], object]) -> None:
        self.folder, self.die_at, self.report = str(folder), die_at, report
        self.names: list[str] = []
        self.busy = False  # what this class does itself is not counted

    def install(self) -> None:
        """For the rest of the process."""
        sys.addaudithook(self.audit)
        self.wrap(os, "fsync", lambda handle: f"/proc/self/fd/{handle}", before="fsync")
        self.wrap(Path, "write_bytes", str, after="torn")
        self.wrap(Path, "write_text", str, after="torn")
        self.wrap(files, "write_one_by_one", lambda path, like: str(path), after="torn")

    def wrap(
        self, owner: Any, name: str, place: Callable[..., str], before: str = "", after: str = ""
    ) -> None:
        """Make `owner.name` a point, before it is called, after it, or both; `place` finds its file."""
        plain = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            path = os.path.realpath(place(*arguments[: 1 if owner is Path else 2]))
            if before:
                self.pass_point(before, path)
            result = plain(*arguments, **options)
            if after:
                self.pass_point(after, path, lambda: os.truncate(path, os.path.getsize(path) // 2))
            return result

        setattr(owner, name, wrapped)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.busy or not arguments or not isinstance(arguments[0], str | os.PathLike):
            return
        if event == "open":
            _, mode, flags = arguments
            if not (flags & WRITING if isinstance(flags, int) else mode and set(mode) & set("wax+")):
                return
        elif event not in AUDITED:
            return
        self.pass_point(event.rpartition(".")[2], os.path.abspath(os.fspath(arguments[0])))

    def pass_point(self, operation: str, path: str, harm: Callable[[], object] = lambda: None) -> None:
        if not path.startswith(self.folder):
            return
        name = RANDOM.sub(".partial", os.path.relpath(path, self.folder))
        self.names.append(f"{operation} {name}")
        if len(self.names) == self.die_at:
            self.busy = True
            harm()
            self.report(self.names[-1])
            os.kill(os.getpid(), signal.SIGKILL)
