"""toolkit/launch/precision.py: what `--mixed_precision auto` chooses."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runs import Finished, fork, free_port
from toolkit.errors import UserError
from toolkit.launch import precision


@pytest.fixture(autouse=True)
def _no_precision(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [
        ((9, 0), "bf16"),
        ((8, 6), "bf16"),
        ((8, 0), "bf16"),
        ((7, 5), "fp16"),
        ((7, 0), "fp16"),
        ((6, 1), "no"),
    ],
)
def test_precision_of_a_gpu(
    capability: tuple[int, int], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    result, why = precision.auto_precision(None, 1)
    assert result == chosen
    assert "GPU 1" in why


@pytest.mark.parametrize(
    ("name", "able", "chosen"),
    [
        ("AMD EPYC 9B14", ["avx512_bf16"], "bf16"),  # 2.1 times as fast as fp32
        ("Intel(R) Xeon(R) Platinum 8481C", ["avx512_bf16", "amx_bf16"], "bf16"),
        ("Intel(R) Xeon(R) with avx512_bf16 alone", ["avx512_bf16"], "no"),  # 1.4 times as slow
        ("AMD EPYC 7763", ["avx2"], "no"),
    ],
)
def test_precision_of_a_cpu(
    name: str, able: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    capabilities = {"cpu_name": name, "num_sockets": 1, **dict.fromkeys(able, True)}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    result, why = precision.auto_precision(None, None)
    assert result == chosen
    assert name in why


@pytest.mark.parametrize(
    ("launched", "variable", "chosen"),
    [
        (None, None, "CPU"),
        (None, "no", "no"),  # the user's own variable
        ({"distributed_type": "MULTI_GPU"}, "no", "CPU"),  # the default of accelerate's launcher
        ({"mixed_precision": False}, "no", "no"),  # `no` in YAML 1.1
        ({"mixed_precision": "no"}, "no", "no"),
        ({"mixed_precision": "bf16"}, "bf16", "bf16"),
        ({"mixed_precision": "fp16"}, "fp16", "fp16"),
        ({"mixed_precision": "fp8"}, "fp8", "fp8"),
    ],
)
def test_precision_of_a_launch_config(
    launched: dict[str, Any] | None,
    variable: str | None,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    monkeypatch.setattr(precision, "_of_cpu", lambda: ("CPU", ""))
    result, why = precision.auto_precision(launched, None)
    assert (result, "ACCELERATE_MIXED_PRECISION" in why) == (chosen, chosen != "CPU")
    with pytest.raises(UserError, match="fp8") if chosen == "fp8" else contextlib.nullcontext():
        precision.refuse_other_precision(None)  # toolkit predict


@pytest.mark.parametrize(("enabled", "chosen"), [(True, "bf16"), ("auto", "CPU"), (False, "CPU")])
def test_deepspeeds_own_precision(
    enabled: Any, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"bf16": {"enabled": enabled}, "fp16": {"enabled": "auto"}})
    )
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(precision, "_of_cpu", lambda: ("CPU", ""))
    assert precision.auto_precision({}, None)[0] == chosen
    with (
        pytest.raises(UserError, match=r"ds\.json enables bf16")
        if enabled is True
        else contextlib.nullcontext()
    ):
        precision.refuse_other_precision("no")  # accelerate computes in bf16
    precision.refuse_other_precision(chosen)


@pytest.mark.parametrize(
    ("device", "setting", "matmul"),
    [
        ("cuda", "bf16", "high"),
        ("cuda", "fp16", "high"),
        ("cuda", "no", "highest"),
        ("cpu", "bf16", "highest"),
    ],
)
def test_tf32_follows_the_final_precision(device: str, setting: str, matmul: str) -> None:
    """Whether auto, a resumed checkpoint or `--mixed_precision` chose it."""
    accelerator: Any = SimpleNamespace(device=torch.device(device), mixed_precision=setting)
    try:
        precision.choose_matmul_precision(accelerator)
        assert torch.get_float32_matmul_precision() == matmul
        assert device == "cpu" or torch.backends.cudnn.allow_tf32 is (matmul == "high")
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True


UNLIKE = """
import os, sys
from toolkit import launch
from toolkit.launch import precision

precision._of_cpu = lambda: ("bf16" if os.environ["RANK"] == "0" else "no", "it says so")
launch.run(lambda: print(launch.make_accelerator(sys.argv[1]).mixed_precision))
"""


@pytest.mark.multiprocess
def test_cpus_that_choose_differently(tmp_path: Path) -> None:
    """No rank computes in another precision than the others; that of a checkpoint on rank 0's disk
    holds for all."""
    (tmp_path / "script.py").write_text(UNLIKE)

    def ranks(*settings: str) -> list[Finished]:
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = []
        for rank, setting in enumerate(settings):
            env = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(fork([tmp_path / "script.py", setting], env))
        return [process.finish() for process in started]

    ended = ranks("auto", "auto")
    assert [one.code for one in ended] == [1, 1]
    assert "bf16 on rank 0 and no on rank 1" in ended[0].err
    assert "--mixed_precision no" in ended[0].err
    ended = ranks("bf16", "auto")
    assert [one.out for one in ended] == ["bf16\n"] * 2
