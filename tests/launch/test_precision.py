"""toolkit/launch/precision.py: what `--mixed_precision auto` chooses, and what it measures and caches on a CPU."""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.faults import refusal
from tests.launch.ranks import run_group
from tests.runs import start
from toolkit.config import PretrainedSettings
from toolkit.errors import UserError
from toolkit.launch import precision
from toolkit.pretrained import layer_of


@pytest.fixture(autouse=True)
def _no_precision(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [((9, 0), "bf16"), ((8, 6), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16"), ((6, 1), "no")],
)
def test_precision_of_a_gpu(capability: tuple[int, int], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    result, why = precision.auto_precision(None, 1)
    assert result == chosen
    assert "GPU 1" in why


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "built", "works"),
    [((7, 0), CUDA_13, False), ((7, 5), CUDA_13, True), ((8, 9), CUDA_13, True), ((9, 0), CUDA_13, True),
     ((11, 0), CUDA_13, False), ((12, 1), CUDA_13, True), ((7, 0), ["sm_50", "sm_60", "sm_70"], True),
     ((6, 1), ["sm_50", "sm_60", "sm_70"], True), ((9, 0), ["gfx90a"], True)],
)  # fmt: skip
def test_gpus_for_which_torch_was_not_built(
    capability: tuple[int, int], built: list[str], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    fault = precision.missing_kernels(0)
    assert (fault == "") is works
    assert works or "Tesla V100" in fault


def test_emulation_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, mixed, says in (((7, 5), "bf16", True), ((7, 5), "fp16", False), ((8, 0), "bf16", False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        gpu: Any = SimpleNamespace(device=torch.device("cuda"), mixed_precision=mixed)
        assert ("Tesla T4" in precision.emulated(gpu)) is says
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"), mixed_precision="bf16")
    monkeypatch.setattr(precision, "cpu_name", lambda: "EPYC 7763")
    for capabilities, says in (({"avx2": True, "avx512_bf16": False}, True), ({"amx_bf16": True}, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda value=capabilities: value)
        assert ("EPYC 7763" in precision.emulated(on_cpu)) is says


@pytest.mark.parametrize(
    ("launched", "variable", "chosen"),
    [
        (None, None, "auto"),
        (None, "no", "no"),  # the user's own variable
        ({"distributed_type": "MULTI_GPU"}, "no", "auto"),  # the default of accelerate's launcher
        ({"mixed_precision": False}, "no", "no"),  # `no` in YAML 1.1
        ({"mixed_precision": "no"}, "no", "no"),
        ({"mixed_precision": "bf16"}, "bf16", "bf16"),
        ({"mixed_precision": "fp16"}, "fp16", "fp16"),
        ({"mixed_precision": "fp8"}, "fp8", "fp8"),
    ],
)
def test_precision_of_a_launch_config(
    launched: dict[str, Any] | None, variable: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    result, why = precision.auto_precision(launched, None)
    assert (result, "ACCELERATE_MIXED_PRECISION" in why) == (chosen, launched is None and variable is not None)
    with pytest.raises(UserError, match="fp8") if chosen == "fp8" else contextlib.nullcontext():
        precision.refuse_other_precision(None)  # toolkit predict


@pytest.mark.parametrize(("enabled", "chosen"), [(True, "bf16"), ("auto", "auto"), (False, "auto")])
def test_deepspeeds_own_precision(enabled: Any, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": enabled}, "fp16": {"enabled": "auto"}}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert precision.auto_precision({}, None)[0] == chosen
    with pytest.raises(UserError, match=r"ds\.json enables bf16") if enabled is True else contextlib.nullcontext():
        precision.refuse_other_precision("no")  # accelerate computes in bf16
    precision.refuse_other_precision(chosen)


def test_a_deepspeed_config_without_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    for content in ({"fp16": None}, [], {"bf16": True}):
        (tmp_path / "ds.json").write_text(json.dumps(content))
        if "bf16" not in content:
            assert precision.enabled_in_deepspeed_config() is None
    refusal(precision.enabled_in_deepspeed_config, match="ds.json: bf16 is true and should be a section")


@pytest.mark.parametrize(
    ("device", "setting", "matmul"),
    [("cuda", "bf16", "high"), ("cuda", "fp16", "high"), ("cuda", "no", "highest"), ("cpu", "bf16", "highest")],
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


SMALL = (32, 64)


def test_trial_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first = precision.measure_cached(SMALL)
    assert set(first) == {"no", "bf16"}
    assert min(first.values()) > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)  # the losses of a run do not depend on it
    monkeypatch.setattr(precision, "measure", lambda widths: {"no": 1.0, "bf16": float(widths[0])})
    assert precision.measure_cached(SMALL) == first
    assert precision.measure_cached((48, 64)) == {"no": 1.0, "bf16": 48.0}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # another CPU
    assert precision.measure_cached(SMALL) == {"no": 1.0, "bf16": 32.0}
    for file in (tmp_path / "precision").glob("*.json"):
        file.write_text("")  # a power cut
    assert precision.measure_cached((48, 64)) == {"no": 1.0, "bf16": 48.0}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file"))
    assert precision.measure_cached(SMALL) == {"no": 1.0, "bf16": 32.0}


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([{"no": 12.0, "bf16": 2.5}], "bf16"),  # an AMD EPYC with avx512_bf16 and no AMX
        ([{"no": 2.0, "bf16": 3.0}], "no"),  # a Xeon with the same
        ([{"no": 1.05, "bf16": 1.0}], "no"),
        ([{"no": 2.0, "bf16": 1.0}, None, {"no": 2.0, "bf16": 1.9}], "no"),
        ([{"no": 2.0, "bf16": 1.0}, {"no": 3.0, "bf16": 1.9}], "bf16"),
    ],
)
def test_faster_precision(trials: list[Any], chosen: str) -> None:
    assert precision.faster_precision(precision.slowest_times(trials)) == chosen


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["AVX2", "AVX512_CORE"])
def test_emulated_bf16(limit: str) -> None:
    code = "from toolkit.launch.precision import *; print(faster_precision(measure(BERT_BASE)))"
    environment = {"ONEDNN_MAX_CPU_ISA": limit, "OMP_NUM_THREADS": "1"}
    command = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-c", code]
    assert start(command).succeeded().out == "no\n"


@pytest.mark.parametrize(
    ("config", "widths"),
    [
        ({"model_type": "bert", "hidden_size": 384, "intermediate_size": 1536}, (384, 1536)),
        ({"model_type": "distilbert", "dim": 128, "hidden_dim": 256}, (128, 256)),
        (None, precision.BERT_BASE),
    ],
)
def test_layer_of(config: dict[str, Any] | None, widths: tuple[int, int], tmp_path: Path) -> None:
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert layer_of(PretrainedSettings(model_name_or_path=str(tmp_path)))() == widths


UNLIKE = """
from toolkit.launch import precision
trials = {"no": 10.0, "bf16": 5.0}, {"no": 9.0, "bf16": 9.5}
precision.measure_cached = lambda _: trials[int(os.environ["RANK"])]
precision.emulated = lambda each: f"CPU {os.environ['RANK']} emulates bf16" * (each.mixed_precision == "bf16")
accelerator = launch.make_accelerator(SETTING)
print(accelerator.mixed_precision, accelerator.state.precision_trial)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("first", "out"),
    [("auto", "no {'no': 10.0, 'bf16': 9.5}\n"), ("bf16", "bf16 None\n")],  # bf16: of a checkpoint on host A's disk
)
def test_ranks_that_measured_differently_agree(first: str, out: str) -> None:
    ended = run_group(*(f"SETTING = {setting!r}{UNLIKE}" for setting in (first, "auto")), hosts=["A", "B"])
    assert [one.out for one in ended] == [out] * 2
    line = "mixed precision no: a layer of this width took 10 ms in fp32 and 9.5 ms in bf16 on this CPU"
    assert ended[0].err.startswith(line if first == "auto" else "CPU 0 emulates bf16\nCPU 1 emulates bf16\n")
