"""Three tutorials as a newcomer runs them: `python docs/site/fresh_run.py` writes a transcript.

What is committed is cloned into a new folder, an environment of its own is made there, the library installed
as the README says, and the tutorials are run by their commands. The page shows what the terminal showed, with
the time of every command; long installations are cut to their last line.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "transcript.md"
TUTORIALS = ("translator", "own_attention", "kernels")
PYTHON = ".venv/bin/python"
DESCRIBE = """
from polyformer.core.ops.tuning.machine import description
machine = description()
print(f"{machine['cores']} cores of an {machine['processor']} ({machine['instruction set']})")
"""
HEAD = """# Three tutorials in a fresh environment

What a terminal shows where nothing was installed before: a clone, an environment, and the commands that the
tutorials name. Made by `python docs/site/fresh_run.py` on {day}, {machine}, {python}, at commit
{commit}. In its last quarter of an hour {load:.0f} processes wanted a core at a time: a machine that does
nothing else takes less time.

"""


def shown(words: list[str], folder: Path, last: int | None = None) -> str:
    """The command, what it prints (the `last` lines of it, where they are counted) and its seconds.

    Raises `CalledProcessError` for one that fails.
    """
    before, used = time.monotonic(), processor_seconds()
    outside = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in outside}
    run = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds, used = time.monotonic() - before, processor_seconds() - used
    if run.returncode:
        sys.stdout.write(run.stdout)
        run.check_returncode()
    lines = run.stdout.strip().splitlines()
    cut = lines if last is None else lines[-last:]
    kept = [line if len(line) <= 110 else f"{line[:107]}..." for line in cut]
    left_out = ["..."] if len(cut) < len(lines) else []
    return "\n".join(
        [f"$ {' '.join(words)}", *left_out, *kept, f"# {seconds:.0f} s, {used:.0f} s of processor time", ""]
    )


def processor_seconds() -> float:
    """What the commands so far have used, on all cores together."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run everything and write the page."""
    parts: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "polyformer"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        steps = [shown([sys.executable, "-m", "venv", ".venv"], folder).replace(sys.executable, "python3")]
        install = [PYTHON, "-m", "pip", "install", "--constraint", "constraints.txt", "."]
        steps.append(shown(install, folder, last=1))
        parts.append("## The library\n\n```text\n" + "\n".join(steps) + "```\n")
        for name in TUTORIALS:
            text = shown([PYTHON, f"docs/tutorials/{name}.py"], folder)
            parts.append(f"## {name}\n\nThe page: [{name}.py]({name}.py).\n\n```text\n{text}```\n")
        machine, version, commit = (
            subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
            for words in (
                [PYTHON, "-c", DESCRIBE],
                [PYTHON, "--version"],
                ["git", "rev-parse", "--short", "HEAD"],
            )
        )
        shutil.rmtree(folder)
    head = HEAD.format(
        load=os.getloadavg()[2],
        day=time.strftime("%Y-%m-%d"),
        machine=machine,
        python=version,
        commit=commit,
    )
    PAGE.write_text(head + "\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
