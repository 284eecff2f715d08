"""A run that leaves GPUs or tasks of Slurm idle says so, with the words that use them all."""

from types import SimpleNamespace

import pytest
import torch

from toolkit.report import summary


@pytest.mark.parametrize(
    ("processes", "device", "gpus", "tasks", "says"),
    [
        (1, "cuda", 4, "1", "3 of 4 GPUs are idle: --config_file accelerate_configs/ddp.yaml --num_processes 4"),
        (1, "cuda", 1, "1", ""),
        (4, "cuda", 4, "4", ""),
        (1, "cpu", 0, "2", "one process of 2 (SLURM_NTASKS): srun"),
    ],
)  # fmt: skip
def test_idle_lines(
    processes: int, device: str, gpus: int, tasks: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setenv("SLURM_NTASKS", tasks)
    accelerator = SimpleNamespace(num_processes=processes, device=torch.device(device))
    lines = summary._idle_lines(accelerator)
    assert len(lines) == bool(says)
    assert says in "".join(lines)
