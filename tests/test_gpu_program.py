"""The program of `make gpu`, in small on the CPU: its report, what it repeats, and a step that fails."""

import json
from pathlib import Path

import gpu
from forking import run_python

WAITS = """{"member": "a", "lines": {"nn/x.py:3": 2}}"""
REPORT = f"""<testsuites><testsuite>
<testcase classname="tests.test_gpu" name="good[a]">
<properties><property name="waits" value='{WAITS}'/></properties>
</testcase>
<testcase classname="tests.test_gpu" name="bad[b]"><failure message="assert False">long</failure></testcase>
<testcase classname="tests.test_gpu" name="none[c]"><skipped/></testcase>
</testsuite></testsuites>"""


def test_the_report_says_what_passed_and_what_waits(tmp_path: Path) -> None:
    file = tmp_path / "report.xml"
    file.write_text(REPORT)
    cases = gpu.cases(file)
    assert (cases["passed"], cases["skipped"]) == (1, 1)
    assert cases["failures"] == {"test_gpu::bad[b]": "assert False"}
    assert cases["waits"] == {"nn/x.py:3": {"times": 2, "members": 1}}
    report = {"device": "none", "versions": {}, "steps": {"members": cases | {"seconds": 1}}}
    page = gpu.page(report)
    assert "| members | 1 | 1 | 1 |" in page
    assert "| nn/x.py:3 | 2 | 1 |" in page


def test_a_failed_step_stops_no_other_and_is_repeated(tmp_path: Path) -> None:
    words = [gpu.__file__, "--tiny", "--out", tmp_path, "--only", "mechanisms", "step-float32"]
    assert run_python(*words, "--limit", 1).returncode == 1
    failed = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert failed["mechanisms"]["failures"]
    assert failed["step-float32"]["failures"]
    done = run_python(*words[:-2], "step-float32")
    assert (done.returncode, done.stdout.splitlines()[-1].partition(":")[0]) == (0, "step-float32")
    assert "TFLOP/s" in (tmp_path / "gpu.md").read_text()
    assert run_python(*words[:-2], "step-float32").stdout == ""
