"""Promises: `toolkit doctor` gives the command that mends each fault of this machine, whatever the shell has set."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.runs import Finished, begin, free_port, start

DOCTOR = [sys.executable, "-m", "toolkit", "doctor"]


def doctor(*arguments: str | Path, **options: Any) -> Finished:
    return start(["toolkit", "doctor", *arguments], seconds=90, **options)


def findings_of(done: Finished) -> dict[str, dict[str, str]]:
    """Name -> finding; stdout is one JSON object."""
    return {finding["name"]: finding for finding in json.loads(done.out)["findings"]}


def test_problems_have_commands_that_solve_them(tmp_path: Path) -> None:
    """The lock of a killed build, and a launcher's variables: with RANK=3 other commands are silent."""
    folder = tmp_path / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    launcher = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "192.0.2.7",
        "MASTER_PORT": "1",
    }
    done = doctor(
        "--json", env={**launcher, "TORCH_EXTENSIONS_DIR": str(tmp_path), "NCCL_DEBUG": "INFO"}
    )
    findings, output = findings_of(done), json.loads(done.out)
    assert (done.code, output["ok"], output["host"]) == (1, False, socket.gethostname())
    assert output["environment"]["python_version"].startswith(f"{sys.version_info.major}.")
    names = ("python", "libraries", "backend", "disk", "interfaces")
    assert [findings[name]["area"] for name in names] == [
        "versions",
        "versions",
        "devices",
        "host",
        "network",
    ]
    unset = f"unset {' '.join(sorted(launcher))}"
    assert (findings["launcher"]["level"], findings["launcher"]["remedy"]) == ("warn", unset)
    assert findings["variables"]["text"] == "NCCL_DEBUG=INFO"
    assert findings["cpu_adam"]["level"] == "fail"
    subprocess.run(findings["cpu_adam"]["remedy"], shell=True, check=True)
    assert not (folder / "lock").exists()


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    done = start([*DOCTOR, "--json"], env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"})
    torch = findings_of(done)["torch"]
    assert (done.code, torch["level"]) == (1, "fail")
    assert torch["text"] == "torch cannot be imported: ImportError: libcudart.so.12: cannot open"
    assert torch["remedy"].startswith("pip install --force-reinstall 'torch")


def test_what_is_printed(tmp_path: Path) -> None:
    done = doctor("--output_dir", tmp_path / "run", "--config_file", "accelerate_configs/ddp.yaml")
    headings = [text for text in done.out.splitlines() if text and not text.startswith(" ")]
    assert headings[:1] == [socket.gethostname()]
    assert {"versions", "devices", "host", "builds", "network"} <= set(headings)
    assert done.err == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "says"), [
    ("--timeout 0", "--timeout 0: give seconds from 1 to 600"), ("--seed 3", "no settings of a recipe: --seed"),
    ("--peer 10.0.0.1", "did you mean peers?"),
])  # fmt: skip
def test_a_wrong_command_line_is_one_line(words: str, says: str) -> None:
    done = doctor(*words.split(), env={"RANK": "3", "WORLD_SIZE": "8"})
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert says in done.err


def test_ctrl_c() -> None:
    port = str(free_port())
    line = [
        "--peers",
        "127.0.0.1,192.0.2.77",
        "--machine_rank",
        "0",
        "--main_process_port",
        port,
        "--timeout",
        "60",
    ]
    with begin([*DOCTOR, *line]) as process:
        assert process.line("err").startswith("this is machine 0")
        assert process.line("err").startswith("waiting for machine 1")
        process.send_signal(signal.SIGINT)
        done = process.finish(20)
    assert (done.code, done.err) == (130, "interrupted\n")
