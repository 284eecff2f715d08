"""`make gpu-report`: parts in their order, one after the other, each with a limit; what was cut goes on."""

import json
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, start

PART = """
import json, os, signal, sys, time
from pathlib import Path
name, folder = sys.argv[1], Path(sys.argv[2])
with (folder / "order").open("a") as file:
    print(name, end=" ", file=file)
if name == "cut" and (folder / "order").read_text().count("cut") == 1:
    os.kill(os.getppid(), signal.SIGKILL)
if name in ("cut", "slow"):
    time.sleep(1 if name == "cut" else 60)
if name == "wrong":
    sys.exit("error: no such model")
Path(os.environ["GPU_REPORT_FIGURES"]).write_text(json.dumps({"": name, "samples/s": 1234.5}))
"""
TESTS = "def test_one(): pass\ndef test_two(): assert False\n"
REPORT = """
import sys
from pathlib import Path
from gpu_report import TESTS, Part, Report
folder = Path(sys.argv[1])
parts = [Part("Speed", name, f"{folder}/part.py {name} {folder}", 1.0 if name == "slow" else 20)
         for name in ("first", "cut", "slow", "wrong")]
parts.append(Part(TESTS, "two", f"-m pytest -n 2 -p gpu_report {folder}/test_them.py", 60))
parts.append(Part("Long", "", "-c pass", 1e6))
facts = {"device": "NVIDIA X", "rehearsal": False}
Report(parts, {"device": "cuda"}, folder / "new" / "state", folder, facts).run(300)
"""


def test_parts_run_in_order_within_limits_and_go_on_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(PART)
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "gpu-nvidia-x.md").write_text("of an earlier report")
    orders = []
    for code in (-9, 0, 0):
        env = {"PYTHONPATH": f"{ROOT}:{ROOT}/benchmarks", "TMPDIR": str(tmp_path)}
        # not as a worker of the tests that run this one
        env["PYTEST_XDIST_WORKER"] = ""
        assert start([sys.executable, "-c", REPORT, tmp_path], env=env).code == code
        orders.append((tmp_path / "order").read_text().split())
        (tmp_path / "order").write_text("cut ")
    # the second goes on; the third runs what failed
    assert orders == [["first", "cut"], ["cut", "cut", "slow", "wrong"], ["cut", "slow", "wrong"]]
    assert (tmp_path / "gpu-nvidia-x.md").read_text() == "of an earlier report"
    (page,) = tmp_path.glob("gpu-nvidia-x-*.md")
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if "|" in line]
    results = {row[0]: row[-1] for row in rows}
    assert (results["Speed: first"], results["first"]) == ("done", "1,234")
    assert results["Speed: slow"] == "not done after 1 s"
    assert results["Speed: wrong"].startswith("no such model")
    assert results["Long"] == "not run"
    state = json.loads((tmp_path / "new" / "state" / "state.json").read_text())
    (tests,) = state["results"]["Tests for GPUs: two"]["rows"]
    assert (tests["passed"], tests["failed"], tests["failed tests"]) == (1, 1, "test_two")


def test_the_share_of_the_peak_is_that_of_an_earlier_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """31.1 % at 581,636 tokens a second in texts of 128 (benchmarks/results/gpu-nvidia-h200.md)."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_report

    share = 581636 * gpu_report.operations_per_token(12, 128, 3) / gpu_report.PEAKS["NVIDIA H200"]
    assert share == pytest.approx(0.311, rel=0.02)
