"""What peers send is fit for a terminal; what is printed."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from toolkit.errors import plain
from toolkit.features.doctor import compare, data, job, network, peers
from toolkit.features.doctor.compare import Node
from toolkit.features.doctor.finding import Finding, last_line, report
from toolkit.features.doctor.peers import Link
from toolkit.launch import rank_rendezvous
from toolkit.launch.channel import UnreachableError
from toolkit.launch.nodes import Nodes

FOUND = [Finding("network", "port", "fail", "29600 is taken", "kill 7"), Finding("host", "disk", "ok", "64 GB"),
         Finding("host", "shared", "warn", "little", "rm", "hostB")]  # fmt: skip


def test_text_from_elsewhere_carries_no_control_characters() -> None:
    assert plain("\x1b]0;title\x07red\x1b[31m\nnext\u202e") == "]0;title red [31m next"
    assert plain("文本 Ärger") == "文本 Ärger"
    assert len(plain("x" * 5000)) == 1000
    assert plain("half a \ud800 pair").encode() == b"half a   pair"


def test_the_text_is_grouped_and_aligned() -> None:
    assert report(FOUND) == (
        "host\n"
        "  ok    disk    64 GB\n"
        "  !!    shared  [hostB] little\n"
        "                -> rm\n"
        "network\n"
        "  FAIL  port    29600 is taken\n"
        "                -> kill 7"
    )


def test_the_last_line() -> None:
    assert last_line(FOUND, "accelerate launch x.py") == "1 failure, 1 warning; first: 29600 is taken"
    assert last_line(FOUND[1:2], "accelerate launch x.py") == "all well: start with `accelerate launch x.py`"
    assert last_line(FOUND[1:2], "") == "all well"
    assert last_line(FOUND[1:], "go") == "1 warning; first: on hostB: little\nno failure: start with `go`"
    assert last_line(FOUND[:1] * 2, "") == "2 failures; first: 29600 is taken"


HOSTILE = "it's; reboot"
HERE = Node(0, "A", HOSTILE, HOSTILE)
THERE = Node(1, "B", HOSTILE, HOSTILE)
NAMED = Nodes(2, 0, "", (HOSTILE, HOSTILE), 1)


@pytest.mark.parametrize(
    "line",
    [
        UnreachableError(HOSTILE, 1, "no_route", "").remedy,
        rank_rendezvous._doctor("10.0.0.1", HOSTILE),
        *(data.check({"x": {"path": HOSTILE, **how}})[0].remedy for how in ({"missing": True}, {"unread": "no"})),
        network.check_interfaces(Nodes(2, 0, "", ("10.0.0.1", HOSTILE), 1), [])[1].remedy,
        peers._mend(HERE, THERE, Link(kind="silent"), NAMED),
        peers._mend_all_reduce("gloo", [HERE, THERE], NAMED),
        job.line_elsewhere(job.read(["--train_file", HOSTILE], {}), 1),
        job.line_to_start(job.read(["recipes/cls.py", "--train_file", HOSTILE], {})),
    ],
)
def test_lines_to_paste_are_quoted(line: str) -> None:
    """Whatever the user calls a path or a host."""
    assert HOSTILE not in line
    assert """it'"'"'s; reboot'""" in line


UNLIKE = [Node(rank, "A", HOSTILE, HOSTILE, {"peft": f"{HOSTILE}{rank}", HOSTILE: f"{rank}"}, {HOSTILE: f"{rank}"},
               {HOSTILE: {"path": HOSTILE, "digest": f"{rank}"}}, environment={f"NCCL_X; {HOSTILE}": f"{rank}"},
               findings=[asdict(Finding(HOSTILE, "x", "fail", HOSTILE, HOSTILE))]) for rank in (0, 1)]  # fmt: skip


def test_nothing_that_another_machine_says_becomes_a_line_to_type() -> None:
    nodes = peers._nodes({node.rank: {"node": asdict(node)} for node in UNLIKE})
    failed = {"gloo": {"ok": False, "error": HOSTILE}}
    links = {(0, 1): Link(False, "silent", HOSTILE), (1, 0): Link(False, HOSTILE, HOSTILE)}
    found = peers.Cluster(nodes, links, {0: failed, 1: failed})
    for own in (0, 1):
        unknown = Nodes(2, own, "", ("10.0.0.1",), 1)
        findings = [*compare.check(nodes), *peers.check(found, unknown, {0: "go", 1: "go"}, 4.0)]
        assert len(findings) >= 5
        assert [finding.remedy for finding in findings if HOSTILE in finding.remedy] == []
