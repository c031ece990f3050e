"""Everything that only a machine with a GPU can show: `python tests/gpu.py --help`, or `make gpu`.

Checks run at the same time, then benchmarks in turn. Each is a process with a time limit, so that none stops
the others. The report, a JSON file and a page next to it, is written after each; the same command repeats
only what is missing or failed. Without a GPU `--tiny` runs everything in small, to test this program.
"""

import argparse
import collections
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parent
GPT2 = ["--batch", "8", "--length", "1024", "--optimizer", "adamw", "--repeats", "10"]
SMALL = "--layers 1 --hidden-size 32 --heads 2 --vocab-size 50 --batch 1 --length 16 --repeats 1"


@dataclasses.dataclass(frozen=True)
class Step:
    """A command and its seconds at most. tests: files for pytest; bench: words of `polyformer bench`.

    tiny: the words that replace `bench` without a GPU; share: of the processors, for tests.
    """

    seconds: int
    tests: str = ""
    share: float = 1.0
    bench: tuple[str, ...] = ()
    tiny: str = ""


STEPS = {
    "members": Step(360, "contracts/test_gpu.py", 0.5),
    "patterns": Step(
        360, "attention/functional/test_flex_patterns.py attention/functional/test_flex.py", 0.35
    ),
    "training": Step(240, "training/test_gpu_training.py", 0.15),
    "step-bf16": Step(120, bench=("training", *GPT2, "--autocast", "bfloat16"), tiny=f"training {SMALL}"),
    "step-bf16-dropout": Step(
        120, bench=("training", *GPT2, "--autocast", "bfloat16", "--dropout", "0.1"), tiny=f"training {SMALL}"
    ),
    "step-float32": Step(120, bench=("training", *GPT2), tiny=f"training {SMALL}"),
    "generation": Step(
        120,
        bench=(
            *("generation", "--models", "gpt2", "--beams", "4", "--repeats", "3", "--libraries"),
            *("transformers", "transformers-compiled", "polyformer", "polyformer-compiled"),
        ),
        tiny="generation --models gpt2 --layers 1 --new-tokens 2 --batches 1 --beams 2 --repeats 1",
    ),
    "generation-t5": Step(
        120,
        bench=(
            *("generation", "--models", "t5-small", "--beams", "4", "--repeats", "3"),
            *("--libraries", "transformers", "polyformer", "polyformer-compiled"),
        ),
        tiny="generation --models t5-small --layers 1 --new-tokens 2 --batches 1 --beams 2 --repeats 1",
    ),
    "window": Step(
        120,
        bench=(
            *("attention", "--members", "Window(256)", "--against", "sdpa", "flex", "--backward"),
            *("--lengths", "4096", "16384", "--repeats", "7"),
        ),
        tiny="attention --members Window(4) --against sdpa --lengths 64 --backward",
    ),
    "windows": Step(
        120,
        bench=(
            *(
                "attention",
                "--members",
                "Window(256) | Global(16)",
                "Window(256) + alibi",
                "--against",
                "sdpa",
            ),
            *("--backward", "--lengths", "16384", "--repeats", "7", "--dense-up-to", "16384"),
        ),
        tiny="attention --members Window(4) --against sdpa --lengths 64 --backward",
    ),
    "mechanisms": Step(
        180,
        bench=(
            *("attention", "--members", "performer", "rfa", "linformer(max_length=16384, k=256)"),
            *("lsh(rounds=4)", "routing", "sinkhorn(block_size=64, max_length=16384)", "--against", "sdpa"),
            *("--lengths", "16384", "--repeats", "3", "--dense-up-to", "16384"),
        ),
        tiny="attention --members performer --against sdpa --lengths 64 --repeats 1",
    ),
    "recurrences": Step(
        180,
        bench=(
            *("attention", "--members", "linear", "retention", "gla", "ssd", "delta", "gated_delta"),
            *("--against", "fla", "--causal", "--backward", "--lengths", "16384", "--repeats", "7"),
        ),
        tiny="attention --members gated_delta --against fla --lengths 64 --causal --backward",
    ),
}
HALF = {"generation", "generation-t5", "window", "windows", "mechanisms", "recurrences"}
"""Benchmarks in bfloat16; the others have weights in float32."""


def words(name: str, step: Step, out: Path, tiny: bool) -> list[str]:
    """Return the command of a step, which writes `out`."""
    if step.tests:
        workers = max(1, int(step.share * (os.cpu_count() or 1)))
        files = [str(TESTS / file) for file in step.tests.split()]
        options = ["-n", str(workers), "--junitxml", str(out), "--override-ini", "filterwarnings="]
        return [sys.executable, "-m", "pytest", "--tb=short", *options, *files]
    own = step.tiny.split() if tiny else [*step.bench, "--device", "cuda"]
    half = ["--dtype", "bfloat16"] if name in HALF and not tiny else []
    plot = ["--plot", str(out.with_suffix(".png"))] if own[0] == "attention" else []
    return [sys.executable, "-m", "polyformer", "bench", *own, *half, *plot, "--out", str(out)]


def run(name: str, folder: Path, tiny: bool, limit: int) -> dict[str, Any]:
    """Run a step for at most `limit` seconds and return its result."""
    step = STEPS[name]
    out = folder / f"{name}.{'xml' if step.tests else 'json'}"
    out.unlink(missing_ok=True)
    start = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with open(folder / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            words(name, step, out, tiny),
            cwd=TESTS.parent,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(min(step.seconds, limit))
        except subprocess.TimeoutExpired:
            status = None
            process.send_signal(signal.SIGINT)  # pytest reports what has run
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - start)}
    if step.tests:
        return result | (cases(out) if out.exists() else {"failures": {name: tail(folder / f"{name}.log")}})
    if status != 0 or not out.exists():
        return result | {"failures": {name: tail(folder / f"{name}.log")}}
    return result | {"records": json.loads(out.read_text())["records"]}


def cases(report: Path) -> dict[str, Any]:
    """Return how many tests passed and were skipped, the failures, and the lines that wait for the device."""
    reported = list(ET.parse(report).getroot().iter("testcase"))
    failures, skipped = {}, 0
    waits: dict[str, collections.Counter[str]] = {}
    for case in reported:
        label = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = [*case.iter("failure"), *case.iter("error")]
        skipped += case.find("skipped") is not None
        if bad:
            failures[label] = (bad[0].get("message") or bad[0].text or "")[:600]
        for entry in case.iter("property"):
            if entry.get("name") == "waits":
                data = json.loads(entry.get("value") or "{}")
                for line, number in data["lines"].items():
                    waits.setdefault(line, collections.Counter())[data["member"]] += number
    passed = len(reported) - len(failures) - skipped
    table = {line: {"times": sum(own.values()), "members": len(own)} for line, own in waits.items()}
    return {"passed": passed, "skipped": skipped, "failures": failures, "waits": table}


def tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-4:])[-600:]


def page(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [f"# {report['device']}", "", ", ".join(f"{k} {v}" for k, v in report["versions"].items()), ""]
    lines += ["| step | passed | failed | seconds |", "|---|---|---|---|"]
    for name, result in report["steps"].items():
        counts = result.get("passed", ""), len(result.get("failures", ())), result["seconds"]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    for name, result in report["steps"].items():
        for record in result.get("records", ()):
            lines += ["", f"## {name}: {record['what']}", ""]
            for case in record["cases"]:
                facts = case["facts"]
                times = [
                    f"{contender} {1e3 * seconds['median']:.3g} ms {_figures(facts.get(contender, {}))}"
                    for contender, seconds in case["seconds"].items()
                ]
                lines += [f"- {case['name'] or 'medians'}: {'; '.join(times)}"]
            lines += [f"- absent: {contender}: {why}" for contender, why in record["absent"].items()]
        if result.get("waits"):
            lines += ["", "## Lines that wait for the device in a training step", ""]
            lines += ["| line | times | members |", "|---|---|---|"]
            ordered = sorted(result["waits"].items(), key=lambda item: -item[1]["times"])
            lines += [f"| {line} | {each['times']} | {each['members']} |" for line, each in ordered]
        if result.get("failures"):
            lines += ["", f"## {name}: failures", ""]
            lines += [
                f"- {label}: {' '.join(text.split())[:300]}" for label, text in result["failures"].items()
            ]
    return "\n".join([*lines, ""])


def _figures(facts: dict[str, float]) -> str:
    return "(" + ", ".join(f"{value:.3g} {unit}" for unit, value in facts.items()) + ")" if facts else ""


def main() -> int:
    """Run the steps; the exit status is 1 if any failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="folder of the report and the logs"
    )
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="steps to run")
    parser.add_argument("--again", action="store_true", help="repeat steps that have passed")
    parser.add_argument("--limit", type=int, default=360, help="seconds for each step, at most")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.exit(2, "gpu: error: torch finds no CUDA device; use --tiny to test this program on the CPU\n")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "gpu.json"
    report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"steps": {}}
    report["device"] = "the CPU, in small" if options.tiny else torch.cuda.get_device_name()
    report["versions"] = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
    }
    steps = report["steps"]
    left = [
        name for name in options.only if options.again or name not in steps or steps[name].get("failures")
    ]

    def work(name: str) -> None:
        steps[name] = run(name, options.out, options.tiny, options.limit)
        file.write_text(json.dumps(report, indent=1))
        file.with_suffix(".md").write_text(page(report))
        result = steps[name]
        print(f"{name}: {result['seconds']} s, {len(result.get('failures', ()))} failures", flush=True)

    with ThreadPoolExecutor(1 if options.tiny else 3) as pool:
        list(pool.map(work, [name for name in left if STEPS[name].tests]))
    for name in left:
        if not STEPS[name].tests:
            work(name)
    return int(any(steps[name].get("failures") for name in options.only))


if __name__ == "__main__":
    raise SystemExit(main())
