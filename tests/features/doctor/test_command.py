"""`toolkit doctor` on this machine, as it is typed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.features.doctor.test_job import OWN, needs_address
from tests.runs import Finished, environment, start
from toolkit.launch import network

DOCTOR = [sys.executable, "-m", "toolkit", "doctor"]


def doctor(*arguments: str | Path, **options: Any) -> Finished:
    return start([*DOCTOR, *arguments], seconds=90, **options)


def findings_of(done: Finished) -> dict[str, dict[str, str]]:
    """Name -> finding; the only thing on stdout is one JSON object."""
    return {finding["name"]: finding for finding in json.loads(done.out)["findings"]}


def test_what_is_wrong_here_is_found_with_the_line_that_mends_it(tmp_path: Path) -> None:
    """A lock of a killed build, a file that is missing, and variables that a launcher left: RANK 3 of 8 makes other
    commands wait for a rank 0, and stay silent."""
    folder = tmp_path / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    left = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "1"}
    line = ["recipes/cls.py", "--train_file", "no/such.csv", "--json"]
    done = doctor(*line, env={**left, "TORCH_EXTENSIONS_DIR": str(tmp_path), "NCCL_DEBUG": "INFO"})
    found, output = findings_of(done), json.loads(done.out)
    assert (done.code, output["ok"], output["host"]) == (1, False, socket.gethostname())
    assert output["environment"]["python_version"].startswith(f"{sys.version_info.major}.")
    assert {"python", "libraries", "backend", "disk", "interfaces"} <= set(found)
    assert (found["launcher"]["level"], found["launcher"]["remedy"]) == ("warn", f"unset {' '.join(sorted(left))}")
    assert found["variables"]["text"] == "NCCL_DEBUG=INFO"
    assert "no/such.csv" in found["train_file"]["text"]
    assert found["cpu_adam"]["level"] == "fail"
    subprocess.run(found["cpu_adam"]["remedy"], shell=True, check=True)
    assert not (folder / "lock").exists()


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    done = doctor("--json", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"})
    found = findings_of(done)["torch"]
    assert (done.code, found["level"]) == (1, "fail")
    assert found["text"] == "torch cannot be imported: ImportError: libcudart.so.12: cannot open"
    assert found["remedy"].startswith("pip install --force-reinstall 'torch")


def test_the_line_of_a_run_starts_nothing_and_ends_with_what_to_type(
    reviews: Path, tiny_model: Path, tmp_path: Path
) -> None:
    line = ["recipes/cls.py", "--train_file", str(reviews), "--model_name_or_path", str(tiny_model),
            "--output_dir", str(tmp_path / "run"), "--config_file", "accelerate_configs/ddp.yaml"]  # fmt: skip
    done = doctor(*line)
    headings = [text for text in done.out.splitlines() if text and not text.startswith(" ")]
    assert headings[:1] == [socket.gethostname()]
    assert {"files", "versions", "devices", "host", "builds", "network"} <= set(headings)
    assert headings[-1].endswith(f"start with `accelerate launch {' '.join(line)}`")
    assert f"{reviews}: " in done.out
    assert done.err == ""
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_meant_is_one_line() -> None:
    done = doctor("--timeout", "0", env={"RANK": "3", "WORLD_SIZE": "8"})
    assert (done.code, done.out, done.err) == (1, "", "error: --timeout 0: give seconds from 1 to 600\n")


@needs_address
def test_ctrl_c_ends_it_at_once() -> None:
    command = [*DOCTOR, "--peers", f"{OWN},192.0.2.77", "--main_process_port", str(network.free_port()),
               "--timeout", "60"]  # fmt: skip
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr.readline().startswith("waiting for rank 1")
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - started < 5
    assert (process.returncode, errors) == (130, "interrupted\n")
