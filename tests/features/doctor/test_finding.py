"""Printed text has no control characters; remedies are quoted, and contain nothing that another machine sent."""

from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.errors import printable
from toolkit.features.doctor import host, job, peers
from toolkit.launch.network import UnreachableError
from toolkit.launch.nodes import Nodes, doctor_command
from toolkit.launch.rendezvous import RendezvousError


def test_printable_text_has_no_control_characters() -> None:
    assert printable("\x1b]0;title\x07red\x1b[31m\nnext\u202e") == "]0;title red [31m next"
    assert printable("文本 Ärger") == "文本 Ärger"
    assert len(printable("x" * 5000)) == 1000
    assert printable("half a \ud800 pair").encode() == b"half a   pair"


HOSTILE = "it's; reboot"
NODES = Nodes(2, 0, "", ("10.0.0.1", HOSTILE), 1)
JOB = job.parse(["--train_file", HOSTILE], {})
FAILED = [{"ok": False, "error": HOSTILE}] * 2


@pytest.mark.parametrize(
    "line",
    [UnreachableError(HOSTILE, 1, "no_route", "").remedy, doctor_command("10.0.0.1", HOSTILE), JOB.command_for(1),
     next(host.check_files({"x": Path(HOSTILE)})).remedy, [*host.check_interfaces(NODES)][1].remedy,
     peers._check_backend("gloo", FAILED, ["A", "B"], NODES).remedy],
)  # fmt: skip
def test_paths_and_host_names_in_remedies_are_quoted(line: str) -> None:
    assert HOSTILE not in line
    assert """it'"'"'s; reboot'""" in line


def test_remedies_contain_nothing_that_another_machine_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RendezvousError(HOSTILE, [1])
    for rank in (0, 1):
        nodes = Nodes(2, rank, "", ("10.0.0.1",), 1)
        unknown = replace(job.parse([], {}), nodes=nodes)
        findings = [peers._explain_missing(error, missing, unknown) for missing in (0, 1)]
        findings += [peers._check_backend(backend, FAILED, [HOSTILE] * 2, nodes) for backend in ("gloo", "nccl")]
        assert [finding.remedy for finding in findings if HOSTILE in finding.remedy] == []

    def refuse(*_: object) -> None:
        raise RendezvousError(f"not the same: {HOSTILE}")

    monkeypatch.setattr(peers, "join_ranks", refuse)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", peers.MARKER):
        monkeypatch.setenv(name, "")
    areas, _ = peers.check(replace(JOB, nodes=NODES), uses_nccl=False)
    (finding,) = areas["machines"]
    assert (finding.level, HOSTILE in finding.text, HOSTILE in finding.remedy) == ("fail", True, False)
