"""Several machines side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from toolkit.doctor import compare
from toolkit.doctor.account import Account, Call, read_account
from toolkit.doctor.finding import Finding, worst

FACTS = {"torch": "2.13.0", "python": "3.11", "peft": "0.21.2", "code": "abc"}
FILE = {"path": "x.csv", "bytes": 10, "digest": "d1", "files": {"x.csv": "d1"}}
A = Account(
    0, "hostA", "10.0.0.1", "eth0", 1500, dict(FACTS), {"seed": "3"}, {"train_file": dict(FILE)}, backend="gloo"
)
B = replace(A, rank=1, host="hostB", address="10.0.0.2")


def of(found: list[Finding], name: str) -> Finding:
    (one,) = [finding for finding in found if finding.name == name]
    return one


def test_machines_that_are_alike() -> None:
    found = compare.check([A, B], {1: 0.0004})
    assert worst(found) == "ok"
    assert {finding.name for finding in found} == {"versions", "settings", "train_file", "clocks"}
    assert not [row for row in compare.rows([A, B], {}) if row[0]]


def test_versions_that_differ() -> None:
    other = replace(B, facts={**FACTS, "peft": "0.22.0", "code": "xyz"})
    fault = of(compare.check([A, other], {}), "versions")
    assert fault.level == "fail"
    assert "peft is 0.21.2 on hostA and 0.22.0 on hostB" in fault.text
    assert "pip install peft==0.21.2" in fault.remedy
    marked = [row for row in compare.rows([A, other], {}) if row[0] == "!!"]
    assert marked == [["!!", "peft", "0.21.2", "0.22.0"], ["!!", "code", "abc", "xyz"]]


def test_settings_that_differ_or_are_given_once() -> None:
    fault = of(compare.check([A, replace(B, settings={"seed": "4", "dropout": "0"})], {}), "settings")
    assert fault.text == "--seed is 3 on hostA and 4 on hostB; --dropout is not given on hostA and 0 on hostB"


def test_one_content_in_two_places_is_alike() -> None:
    machines = [
        replace(machine, settings={"train_file": place}) for machine, place in ((A, "/a/x.csv"), (B, "/b/x.csv"))
    ]
    assert worst(compare.check(machines, {})) == "ok"
    assert not [row for row in compare.rows(machines, {}) if row[0]]


def test_content_that_differs() -> None:
    other = {"train_file": {**FILE, "digest": "d2", "files": {"x.csv": "d2"}}}
    fault = of(compare.check([A, replace(B, files=other)], {}), "train_file")
    assert (fault.level, fault.text) == ("fail", "--train_file has not the same content: d1 on hostA and d2 on hostB")
    assert fault.remedy.endswith("rsync -a hostA:x.csv x.csv")


def test_content_that_differs_in_a_folder_names_the_files() -> None:
    one = {"model_name_or_path": {"path": "m", "digest": "1", "files": {"config.json": "a", "weights.bin": "b"}}}
    two = {"model_name_or_path": {"path": "m", "digest": "2", "files": {"config.json": "a", "weights.bin": "c"}}}
    fault = of(compare.check([replace(A, files=one), replace(B, files=two)], {}), "model_name_or_path")
    assert "(in weights.bin)" in fault.text


def test_content_that_is_missing_on_one() -> None:
    other = {"train_file": {"path": "x.csv", "missing": True}}
    fault = of(compare.check([A, replace(B, files=other)], {}), "train_file")
    assert "d1 on hostA and MISSING on hostB" in fault.text
    unread = {"train_file": {"path": "x.csv", "unread": "no time"}}
    assert of(compare.check([A, replace(B, files=unread)], {}), "train_file").level == "note"


@pytest.mark.parametrize(("counts", "asked", "level", "remedy"), [
    ((4, 4), None, "ok", ""),
    ((4, 2), None, "fail", "--num_processes 4 on all machines (2 on each)"),
    ((4, 2), 2, "note", ""),
    ((4, 2), 4, "fail", "CUDA_VISIBLE_DEVICES=0,1"),
    ((2, 2), 4, "fail", "--num_processes 4 on all machines"),
    ((2, 0), None, "fail", "leave it out"),
])  # fmt: skip
def test_numbers_of_gpus(counts: tuple[int, int], asked: int | None, level: str, remedy: str) -> None:
    machines = [replace(machine, devices=("A100 80 GiB",) * count, per_machine=asked)
                for machine, count in zip((A, B), counts, strict=True)]  # fmt: skip
    (found,) = compare.devices(machines)
    assert (found.level, remedy in found.remedy) == (level, True)


def test_machines_without_gpus_have_nothing_to_compare() -> None:
    assert compare.devices([A, replace(B, per_machine=4)]) == []


def test_variables_and_mtu_that_differ() -> None:
    other = replace(B, environment={"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "ens5"}, mtu=9000)
    found = compare.check([A, other], {})
    assert [finding.name for finding in found if finding.level == "warn"] == ["NCCL_IB_DISABLE", "MTU"]
    assert of(found, "MTU").remedy == "on hostB: sudo ip link set dev eth0 mtu 1500"


def test_clocks_that_are_apart() -> None:
    fault = of(compare.check([A, B], {1: -120.5}), "clocks")
    assert (fault.level, "hostB by -120.5 s, against hostA" in fault.text) == ("warn", True)
    assert of(compare.check([A, B], {1: 1.9}), "clocks").level == "ok"


def test_two_hosts_of_one_name_are_told_apart() -> None:
    assert compare.names_of([A, replace(B, host="hostA")]) == {0: "hostA (10.0.0.1)", 1: "hostA (10.0.0.2)"}


def test_an_account_survives_the_way() -> None:
    full = replace(B, calls={0: Call(False, "silent", "no answer", "try"), 2: Call(True)}, per_machine=2,
                   devices=("A100",), findings=(Finding("host", "disk", "fail", "full"),), strangers={"10.0.0.9": "?"},
                   files={"train_file": {**FILE, "missing": False}})  # fmt: skip
    assert read_account(json.loads(json.dumps(full.as_dict())), 1) == full


@pytest.mark.parametrize("sent", [
    {},
    {name: [[]] for name in Account.__dataclass_fields__},
    {name: {"a": {"b": None}} for name in Account.__dataclass_fields__},
    dict.fromkeys(Account.__dataclass_fields__, "\x1b[31m" * 9999),
    {"facts": {str(number): "x" * 9999 for number in range(9999)}, "calls": {"x": 1, "1": 2}, "mtu": "9"},
])  # fmt: skip
def test_whatever_is_sent_as_an_account_is_bounded_and_typed(sent: dict[str, Any]) -> None:
    account = read_account(sent, 1)
    assert account.rank == 1
    assert len(account.facts) <= 300
    assert all(len(value) <= 500 and "\x1b" not in value for value in account.facts.values())
    compare.rows([A, account], {})
    compare.check([A, account], {})
