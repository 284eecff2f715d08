"""Who reaches whom, and what to type where somebody does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.doctor import links
from toolkit.doctor.account import Account, Call
from toolkit.doctor.measure import LARGE_MESSAGES, Measured
from toolkit.launch.machines import Machines

MACHINES = Machines(2, 0, "", ("10.0.0.1", "10.0.0.2"), 29600)
A = Account(0, "hostA", "10.0.0.1", calls={1: Call(True)})
B = Account(1, "hostB", "10.0.0.2", calls={0: Call(True)})
FAST = Measured(0.21, 0.001, 1170.0, 1100.0)
LINES = {1: "toolkit doctor --peers 10.0.0.1,10.0.0.2"}


def test_machines_that_reach_each_other() -> None:
    (found,) = links.check([A, B], {(0, 1): FAST}, MACHINES, LINES, 30)
    assert found.level == "ok"
    assert found.text == "0.21 ms there and back, 9.4 Gbit/s from hostA, 8.8 Gbit/s from hostB"
    there, back = links.links_of([A, B], {(0, 1): FAST})
    assert (there.mbytes_per_second, back.mbytes_per_second) == (1170.0, 1100.0)
    assert there.as_dict({0: "hostA", 1: "hostB"}) == {
        "from": "hostA", "to": "hostB", "ok": True, "kind": "", "detail": "", "latency_ms": 0.21,
        "mbytes_per_second": 1170.0,
    }  # fmt: skip


def test_a_slow_line_says_what_it_means() -> None:
    (found,) = links.measured([A, B], {(0, 1): Measured(1.0, 0.0, 11.8, 110.0)})
    assert found.level == "warn"
    assert "94 Mbit/s from hostA" in found.text
    assert "110M parameters in fp32 takes 37.3 s" in found.text  # 440 MB at 11.8 MB/s


def test_a_machine_that_did_not_come() -> None:
    alone = replace(A, calls={1: Call(False, "silent", "no answer in 4 s", "sudo ufw allow from 10.0.0.1")})
    (found,) = links.check([alone], {}, MACHINES, LINES, 30)
    assert found.level == "fail"
    assert found.text == "machine 1 (10.0.0.2) did not come within 30 s. hostA says: no answer in 4 s"
    assert found.remedy == f"on it type: {LINES[1]}; sudo ufw allow from 10.0.0.1"


@pytest.mark.parametrize(("kind", "words"), [("token", "the same --token"), ("conflict", "in the same order"),
                                             ("stranger", "another program's port")])  # fmt: skip
def test_a_machine_that_is_there_and_does_not_fit(kind: str, words: str) -> None:
    (found,) = links.check([replace(A, calls={1: Call(False, kind, "why")})], {}, MACHINES, LINES, 30)
    assert found.text == "machine 1 (10.0.0.2) is there and was not met. hostA says: why"
    assert words in found.remedy


@pytest.mark.parametrize(("kind", "listens", "remedy"), [
    ("silent", True, "on hostB: sudo ufw allow from 10.0.0.1 to any port 29600 proto tcp  (a firewall drops it"),
    ("refused", True, "on hostB: sudo ufw allow from 10.0.0.1 to any port 29600 proto tcp  (a firewall rejects it"),
    ("refused", False, "on hostB: `sudo ss -ltnp 'sport = :29600'`"),
    ("stranger", True, "on hostB: `sudo ss -ltnp 'sport = :29600'`"),
    ("no_route", True, "on hostA: ip route get"),
    ("local", True, "on hostA: ip route get"),
])  # fmt: skip
def test_one_way_that_is_closed(kind: str, listens: bool, remedy: str) -> None:
    caller = replace(A, calls={1: Call(False, kind, "why", "ip route get")})
    found = links.one_way([caller, replace(B, listens=listens)], MACHINES)
    assert [(finding.name, finding.level) for finding in found] == [("0 -> 1", "fail")]
    assert (
        "hostA does not reach hostB at 10.0.0.2:29600, although the other way works. hostA says: why" in found[0].text
    )
    assert found[0].remedy.startswith(remedy)


def test_large_packets_that_are_lost() -> None:
    (found,) = links.measured([A, B], {(0, 1): f"{LARGE_MESSAGES} in time"})
    assert (found.level, "mtu 1400" in found.remedy) == ("fail", True)
    (other,) = links.measured([A, B], {(0, 1): "10.0.0.2 is gone"})
    assert other.level == "warn"


def test_strangers_are_told_of() -> None:
    (note,) = links.strangers([replace(A, strangers={"10.0.0.9": "it said nothing"}), B])
    assert (note.level, "10.0.0.9" in note.text) == ("note", True)
    (ours,) = links.strangers([replace(A, strangers={"10.0.0.2": "?"}), B])
    assert ours.level == "warn"
