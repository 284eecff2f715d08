"""Variables that change what is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.doctor import shell
from toolkit.doctor.finding import worst

INTERFACES = ["docker0", "eth0", "eth10", "ib0", "lo"]


def test_a_clean_shell() -> None:
    assert shell.check({"PATH": "/bin", "HF_HOME": "/nowhere"}, INTERFACES, config_given=False) == []


def test_variables_a_launcher_left() -> None:
    env = {"WORLD_SIZE": "8", "RANK": "3", "ACCELERATE_USE_DEEPSPEED": "true", "TORCHELASTIC_RUN_ID": "x",
           "ACCELERATE_LOG_LEVEL": "info", "PATH": "/bin"}  # fmt: skip
    (found,) = shell.left_over(env)
    assert found.level == "warn"
    assert found.remedy == "unset ACCELERATE_USE_DEEPSPEED RANK TORCHELASTIC_RUN_ID WORLD_SIZE"
    assert "RANK=3" in found.text


def test_what_nccl_is_told_is_shown() -> None:
    (note,) = shell.communication({"NCCL_IB_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "0,1", "X": "y"})
    assert (note.level, note.text) == ("note", "CUDA_VISIBLE_DEVICES=0,1, NCCL_IB_DISABLE=1")
    assert shell.communication({"X": "y"}) == []


@pytest.mark.parametrize(("value", "taken"), [
    ("eth", ["eth0", "eth10"]),
    ("eth1", ["eth10"]),
    ("=eth0", ["eth0"]),
    ("=eth", []),
    ("^docker,lo", ["eth0", "eth10", "ib0"]),
    ("^=eth0", ["docker0", "eth10", "ib0", "lo"]),
    ("wlan0,ib0", ["ib0"]),
    ("wlan0", []),
])  # fmt: skip
def test_nccls_way_to_name_interfaces(value: str, taken: list[str]) -> None:
    assert shell.nccl_interfaces(value, INTERFACES) == taken


def test_interfaces_that_are_not_there() -> None:
    assert shell.named_interfaces({"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0"}, INTERFACES) == []
    found = shell.named_interfaces({"NCCL_SOCKET_IFNAME": "ens5", "GLOO_SOCKET_IFNAME": "eth"}, INTERFACES)
    assert [(finding.name, finding.level) for finding in found] == [
        ("NCCL_SOCKET_IFNAME", "fail"),
        ("GLOO_SOCKET_IFNAME", "fail"),  # gloo takes whole names
    ]
    assert found[0].remedy.startswith("unset NCCL_SOCKET_IFNAME, or `export NCCL_SOCKET_IFNAME=docker0`")


def test_accelerates_silent_default(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("num_processes: 4")
    env = {"HF_HOME": str(tmp_path)}
    (note,) = shell.check(env, INTERFACES, config_given=False)
    assert (note.level, str(tmp_path) in note.text) == ("note", True)
    assert shell.check(env, INTERFACES, config_given=True) == []


def test_proxies_without_their_passwords() -> None:
    (note,) = shell.proxies({"HTTPS_PROXY": "http://ann:secret@proxy:3128", "no_proxy": "localhost"})
    assert "secret" not in note.text
    assert "proxy" in note.text
    assert worst([note]) == "note"
