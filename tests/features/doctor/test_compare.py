"""Several machines side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.features.doctor import compare
from toolkit.features.doctor.compare import Node
from toolkit.features.doctor.finding import Finding

FACTS = {"torch": "2.13.0", "python": "3.11", "peft": "0.21.2", "code": "abc"}
FILE = {"path": "x.csv", "bytes": 10, "digest": "d1", "files": {"x.csv": "d1"}}
A = Node(0, "hostA", "10.0.0.1", "eth0", dict(FACTS), {"seed": "3"}, {"train_file": dict(FILE)}, backend="gloo")
B = replace(A, rank=1, host="hostB", address="10.0.0.2")


def of(found: list[Finding], name: str) -> Finding:
    (one,) = [finding for finding in found if finding.name == name]
    return one


def test_machines_that_are_alike() -> None:
    """Also where one content lies in two places."""
    places = {"seed": "3", "train_file": "/a/x.csv"}, {"seed": "3", "train_file": "/b/x.csv"}
    found = compare.check([replace(node, settings=place) for node, place in zip((A, B), places, strict=True)])
    assert [(finding.name, finding.level) for finding in found] == [
        ("versions", "ok"), ("settings", "ok"), ("train_file", "ok")
    ]  # fmt: skip


def test_versions_that_differ() -> None:
    other = replace(B, facts={**FACTS, "peft": "0.22.0", "code": "xyz"})
    fault = of(compare.check([A, other]), "versions")
    assert fault.level == "fail"
    assert "peft is 0.21.2 on hostA and 0.22.0 on hostB" in fault.text
    assert "pip install peft==0.21.2" in fault.remedy


def test_settings_that_differ_or_are_given_once() -> None:
    fault = of(compare.check([A, replace(B, settings={"seed": "4", "dropout": "0"})]), "settings")
    assert fault.text == "--seed is 3 on hostA and 4 on hostB; --dropout is not given on hostA and 0 on hostB"


def test_content_that_differs() -> None:
    other = {"train_file": {**FILE, "digest": "d2", "files": {"x.csv": "d2"}}}
    fault = of(compare.check([A, replace(B, files=other)]), "train_file")
    assert fault.level == "fail"
    assert fault.text == "--train_file does not have the same content: d1 on hostA and d2 on hostB"
    folders = [{"model_name_or_path": {"path": "m", "digest": weights, "files": {"a.json": "a", "b.bin": weights}}}
               for weights in "bc"]  # fmt: skip
    fault = of(compare.check([replace(A, files=folders[0]), replace(B, files=folders[1])]), "model_name_or_path")
    assert "(in b.bin)" in fault.text


def test_content_that_is_missing_on_one() -> None:
    other = {"train_file": {"path": "x.csv", "missing": True}}
    fault = of(compare.check([A, replace(B, files=other)]), "train_file")
    assert "d1 on hostA and MISSING on hostB" in fault.text
    unread = {"train_file": {"path": "x.csv", "unread": "no time"}}
    assert of(compare.check([A, replace(B, files=unread)]), "train_file").level == "note"


@pytest.mark.parametrize(("counts", "asked", "level", "remedy"), [
    ((4, 4), None, "ok", ""),
    ((4, 2), None, "fail", "--num_processes 4 on all machines (2 on each)"),
    ((4, 2), 2, "note", ""),
    ((4, 2), 4, "fail", "CUDA_VISIBLE_DEVICES=0,1"),
    ((2, 2), 4, "fail", "--num_processes 4 on all machines"),
    ((2, 0), None, "fail", "leave it out"),
    ((0, 0), 4, "", ""),
])  # fmt: skip
def test_numbers_of_gpus(counts: tuple[int, int], asked: int | None, level: str, remedy: str) -> None:
    machines = [replace(machine, devices=["A100 80 GiB"] * count, processes=asked or 0)
                for machine, count in zip((A, B), counts, strict=True)]  # fmt: skip
    found = compare.check_devices(machines)
    assert [(one.level, remedy in one.remedy) for one in found] == ([(level, True)] if level else [])


def test_variables_that_differ() -> None:
    other = replace(B, environment={"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "ens5"})
    found = compare.check([A, other])
    assert [finding.name for finding in found if finding.level == "warn"] == ["NCCL_IB_DISABLE"]
    assert of(found, "NCCL_IB_DISABLE").text == "NCCL_IB_DISABLE is not set on hostA and 1 on hostB"


@pytest.mark.parametrize(("offset", "level"), [(-120.5, "warn"), (1.9, "ok")])
def test_clocks(offset: float, level: str) -> None:
    machines = [replace(A, clock_offset_seconds=0.0), replace(B, clock_offset_seconds=offset)]
    found = of(compare.check(machines), "clocks")
    assert found.level == level
    assert level == "ok" or "from hostA's: hostB by -120.5 s" in found.text
