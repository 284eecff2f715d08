"""toolkit/launch/launcher.py: which of several failures is reported."""

from __future__ import annotations

import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from toolkit.launch import launcher


@pytest.mark.parametrize(
    ("codes", "reported"),
    [((-signal.SIGABRT, 1, -signal.SIGKILL), 2),  # NCCL aborts ranks whose peer is gone
     ((1, -signal.SIGABRT), 1)],
)  # fmt: skip
def test_a_kill_is_reported_not_what_it_causes(
    codes: tuple[int, ...], reported: int, no_launcher: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failures = {rank: ProcessFailure(rank, 1, code, str(tmp_path / "none")) for rank, code in enumerate(codes)}

    def fail(_: Any) -> None:
        raise ChildFailedError("cls.py", failures)

    reports: list[tuple[int, str]] = []
    monkeypatch.setattr(launcher, "launch_command", fail)
    monkeypatch.setattr(launcher, "_report_exit", lambda code, who, _: reports.append((code, who)))
    launcher._launch(Namespace(num_processes=len(codes)), tmp_path / "exit_code", 0)
    assert reports == [(codes[reported], f"rank {reported}")]
