"""Promises: disks, locks of builds, variables, interfaces and versions that would stop a run are named, with a remedy
that can be pasted."""

import os
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runs import begin
from toolkit.features.doctor import host
from toolkit.features.doctor.finding import Finding
from toolkit.launch.machines import Machines

GB = 10**9
Usage = namedtuple("Usage", "total used free percent")
HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(60)"

TWO = Machines(2, 1, "--machine_rank", "10.0.0.2", 29600)


@pytest.mark.parametrize(("free", "level"), [(50 * GB, "ok"), (5 * GB, "warn"), (GB // 2, "fail")])
def test_free_disk_space(
    free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "it's").mkdir()
    monkeypatch.setattr(host.psutil, "disk_usage", lambda path: Usage(free, 0, free, 0))
    disk, *shared = host.check_disk(tmp_path / "it's" / "runs" / "today")
    assert (disk.level, f"{tmp_path}/it's " in disk.text) == (level, True)
    assert ["--shm-size=8g" in finding.remedy for finding in shared] == (
        [True] if free < GB else []
    )
    monkeypatch.setattr(host.os, "access", lambda *_: False)
    unwritable = next(host.check_disk(tmp_path / "it's"))
    assert "cannot be written" in unwritable.text
    assert """it'"'"'s'`""" in unwritable.remedy


def test_the_lock_of_a_running_and_of_a_killed_build(tmp_path: Path) -> None:
    """The lock is created as by torch's FileBaton."""
    (tmp_path / "py311_cpu" / "deepspeed_shm_comm").mkdir(parents=True)
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    with begin([sys.executable, "-c", HOLD, lock]) as process:
        assert process.line() == "held\n"
        (alive,) = host.check_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
        assert (alive.level, "deepspeed_shm_comm is being built" in alive.text) == ("note", True)
    (stale,) = host.check_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert (stale.level, stale.remedy) == ("fail", f"rm {lock}")
    assert "deepspeed_shm_comm" in stale.text


def test_variables_of_launchers_and_of_nccl() -> None:
    assert list(host.check_shell({"PATH": "/bin", "ACCELERATE_LOG_LEVEL": "info"})) == []
    env = {"WORLD_SIZE": "8", "RANK": "3", "ACCELERATE_USE_DEEPSPEED": "true", "TORCHELASTIC_RUN_ID": "\x1b[31mx",
           "PATH": "/bin", "NCCL_IB_DISABLE": "1"}  # fmt: skip
    launcher, variables = host.check_shell(env)
    names = "ACCELERATE_USE_DEEPSPEED RANK TORCHELASTIC_RUN_ID WORLD_SIZE"
    assert (launcher.level, launcher.remedy) == ("warn", f"unset {names}")
    assert "RANK=3" in launcher.text
    assert "\x1b" not in launcher.text
    assert (variables.level, variables.text) == ("note", "NCCL_IB_DISABLE=1")


def test_the_chosen_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """10.0.x.x is reachable by eth0, other networks are not."""
    addresses = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "172.17.0.1": "docker0"}
    states = {
        name: SimpleNamespace(mtu=1500, isup=name != "docker0") for name in addresses.values()
    }
    monkeypatch.setattr(
        host.network,
        "source_address_for",
        lambda to: "10.0.0.1" if to.startswith("10.0.") else None,
    )
    monkeypatch.setattr(host.network, "local_addresses", lambda: addresses)
    monkeypatch.setattr(host.psutil, "net_if_stats", lambda: states)

    def findings(machines: Machines) -> dict[str, Finding]:
        return {finding.name: finding for finding in host.check_interfaces(machines)}

    two = findings(TWO)
    assert two["interfaces"].text == "eth0 10.0.0.1 (MTU 1500), docker0 172.17.0.1 (down, MTU 1500)"
    assert (two["chosen"].level, two["chosen"].text) == (
        "ok",
        "eth0 (10.0.0.1), by the route to 10.0.0.2",
    )
    assert two["this one"].text == "machine 1 of 2 (--machine_rank)"
    nowhere = findings(replace(TWO, first="10.9.9.9"))["chosen"]
    assert (nowhere.level, nowhere.remedy) == ("fail", "`ip route get 10.9.9.9`, `ip -br link`")
    assert "chosen" not in findings(replace(TWO, count=1))
    hostile = findings(replace(TWO, first="it's; reboot"))["chosen"]
    assert """it'"'"'s; reboot'""" in hostile.remedy


def test_this_environment_has_compatible_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (none,) = host.check_builds(dict(os.environ))
    assert (none.level, none.text) == ("ok", f"{get_default_build_root()}: no stale lock")
    python, libraries, *others = host.check_versions()
    assert (python.level, libraries.level, others) == ("ok", "ok", [])
    assert "torch 2." in libraries.text
    assert "'torch<2" in host.install_command("torch")
