"""`--mixed_precision auto`: the config file's value, or what the hardware computes fast.

A CPU's instruction sets do not tell: with avx512_bf16 and no AMX an AMD EPYC trained twice as fast in bf16, and a Xeon
took 1.4 times as long (benchmarks/results/precision_trial.md). So one layer of the model's width is timed there, once
per machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError
from toolkit.utils.files import Kinds, cache_folder, check_values, replace_file

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import AutocastKwargs

AUTO = "auto"
# CUDA capabilities: RTX 30, A10 and A100 have bf16; V100, T4 and RTX 20 have fast fp16, older GPUs do not
_HAS_BF16, _HAS_FAST_FP16 = (8, 0), (7, 0)

# of a DeepSpeed config
_SECTIONS: Kinds = dict.fromkeys(("bf16", "fp16"), (lambda value: isinstance(value, dict), 'a section with "enabled"'))

Widths = tuple[int, int]
"""(hidden_size, intermediate_size) of a layer."""
Milliseconds = dict[str, float]
"""Time of a forward and backward pass of the layer, by precision: no, bf16."""

BERT_BASE: Widths = (768, 3072)
# bf16 must be this many times as fast to be worth its rounding
MIN_SPEEDUP = 1.1
_TEXTS, _LENGTH, _PAIRS = 2, 128, 2
# variables that limit the instructions oneDNN and torch use
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
# If bf16 takes this many times as long on a few tokens, it is emulated, and the full trial would take minutes.
_PROBE_TOKENS, _EMULATED_RATIO = 16, 3.0


def autocast(accelerator: Accelerator, autocast_handler: AutocastKwargs | None = None) -> torch.autocast:
    """`accelerator.autocast()`, which does nothing under DeepSpeed."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    device = accelerator.device.type if dtype else "cpu"  # not every device has autocast
    options = autocast_handler.to_kwargs() if autocast_handler and dtype else {}
    return torch.autocast(device, dtype, **{"enabled": dtype is not None, **options})


def auto_precision(launch_config: Mapping[str, Any] | None, device: int | None) -> tuple[str, str]:
    """(no, bf16 or fp16, why) by a config file, or else by this process's GPU. (auto, "") for a CPU (`device` None): it
    needs a trial (`measure_cached`).

    `launch_config` is the config of the `accelerate launch` that started this process, or None.
    """
    if enabled := enabled_in_deepspeed_config():
        return enabled, "the DeepSpeed config says so"
    setting = os.environ.get("ACCELERATE_MIXED_PRECISION")
    # accelerate's launcher sets `no` by default
    if setting == "no" and launch_config is not None and launch_config.get("mixed_precision") is None:
        setting = None
    if setting:
        # unknown: the command line of `accelerate launch` cannot be read
        return setting, f"{'ACCELERATE_MIXED_PRECISION' if launch_config is None else 'the accelerate config'} says so"
    return (AUTO, "") if device is None else _of_gpu(device)


def enabled_in_deepspeed_config() -> str | None:
    """The precision that this launch's DeepSpeed config enables by `true` (not "auto"), or None. Raises UserError if
    one is not a section."""
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):  # accelerate raises for a file that it cannot read
        config = dict(json.loads(Path(file).read_text(encoding="utf-8")))
    check_values(config, _SECTIONS, file)
    return next((name for name in _SECTIONS if (config.get(name) or {}).get("enabled") is True), None)


def refuse_other_precision(mixed_precision: str | None) -> None:
    """Raises UserError for fp8, and if this launch's DeepSpeed config enables another precision by name: accelerate
    would compute in that one for `no`."""
    if (mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")) == "fp8":
        raise UserError("mixed_precision fp8 of the accelerate config is not supported: pass --mixed_precision bf16")
    if mixed_precision and (enabled := enabled_in_deepspeed_config()) not in (None, mixed_precision):
        raise UserError(
            f"--mixed_precision {mixed_precision}: {os.environ['ACCELERATE_DEEPSPEED_CONFIG_FILE']} enables {enabled}: "
            f'write "enabled": "auto" there, or pass --mixed_precision {enabled}'
        )


def _of_gpu(device: int) -> tuple[str, str]:
    import torch

    if not torch.cuda.is_available():
        return "no", f"unknown device {torch.accelerator.current_accelerator()}"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip or capability >= _HAS_BF16:
        return "bf16", f"{name} supports it"
    if capability >= _HAS_FAST_FP16:
        return "fp16", f"{name} has no bf16"
    return "no", f"{name} is fast in neither bf16 nor fp16"


def missing_kernels(device: int) -> str:
    """That this build of torch has no kernels for a GPU (V100 and older with CUDA 13); empty if it has."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    built = torch.cuda.get_arch_list()
    for kind, _, number in (arch.partition("_") for arch in built):  # sm_80, sm_90a, compute_120
        code = divmod(int(number.rstrip("af")), 10) if number[:1].isdigit() else (major, 0)  # AMD's: gfx90a
        if code <= (major, minor) and (kind != "sm" or code[0] == major):
            return ""
    name = torch.cuda.get_device_name(device)
    why = f"torch {torch.__version__} has no kernels for {name} (sm_{major}{minor}; it has {', '.join(built)})"
    return f"{why}: install a build of the same version for an older CUDA (12.6 has V100; pytorch.org)"


def emulated(accelerator: Accelerator) -> str:
    """A line for bf16 on an NVIDIA GPU or a CPU that only emulates it."""
    import torch

    device = accelerator.device
    if accelerator.mixed_precision != "bf16" or device.type not in ("cpu", "cuda"):
        return ""
    if device.type == "cpu":
        able, name, remedy = "bf16" in _machine(), cpu_name(), "no"  # amx_bf16, say
    else:
        able = bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= _HAS_BF16
        name, remedy = torch.cuda.get_device_name(device), "fp16"
    line = f"--mixed_precision bf16: {name} has no bf16, and emulates it slowly: pass --mixed_precision {remedy}"
    return "" if able else line


def choose_matmul_precision(accelerator: Accelerator) -> None:
    """TF32 for the fp32 products and convolutions of a bf16 or fp16 run on a GPU; nowhere else.

    Torch's own attention kernels, not cuDNN's, which make a plan for each new shape of a batch, and with a single shape
    took 0.98 of the time on an H100. With texts of up to 512 tokens Trainer took about 2.7 times as long with cuDNN's.
    """
    import torch

    on_gpu = accelerator.device.type == "cuda"
    use_tf32 = on_gpu and accelerator.mixed_precision != "no"
    torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
    if on_gpu:  # by default convolutions (ConvBERT's) are TF32 in fp32 runs, too
        with warnings.catch_warnings(action="ignore"):  # there is a newer name, which torch's compiler does not accept
            torch.backends.cudnn.allow_tf32 = use_tf32
        torch.backends.cuda.enable_cudnn_sdp(False)


# --- the trial on a CPU


def measure_cached(widths: Widths) -> Milliseconds:
    """`measure`, cached per machine."""
    facts = f"{_machine()}, {widths[0]} x {widths[1]}"
    path = cache_folder() / "precision" / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        return {name: float(json.loads(path.read_bytes())[name]) for name in ("no", "bf16")}
    milliseconds = measure(widths)
    with contextlib.suppress(OSError), replace_file(path, flush=False) as draft:
        draft.write_text(json.dumps({"of": facts, **milliseconds}), encoding="utf-8")
    return milliseconds


def slowest_times(trials: Iterable[Milliseconds | None]) -> Milliseconds:
    """The slowest times of the ranks that measured: a step takes as long as its slowest rank."""
    measurements = [trial for trial in trials if trial]
    return {name: max(trial[name] for trial in measurements) for name in ("no", "bf16")}


def faster_precision(milliseconds: Milliseconds) -> str:
    return "bf16" if milliseconds["no"] >= MIN_SPEEDUP * milliseconds["bf16"] else "no"


def measure(widths: Widths) -> Milliseconds:
    """CPU time of one thread, which other load hardly changes: the minimum of a few alternating passes."""
    import torch

    hidden, intermediate = widths
    heads = hidden // 64 if hidden % 64 == 0 else 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            layer = torch.nn.TransformerEncoderLayer(hidden, heads, intermediate, 0.0, "gelu", batch_first=True)
            probe = _fastest_passes(layer, torch.randn(1, _PROBE_TOKENS, hidden, requires_grad=True), 2)
            if probe["bf16"] > _EMULATED_RATIO * probe["no"]:
                return probe
            return _fastest_passes(layer, torch.randn(_TEXTS, _LENGTH, hidden, requires_grad=True), _PAIRS)
    finally:
        torch.set_num_threads(threads)


def _fastest_passes(layer: torch.nn.Module, states: torch.Tensor, pairs: int) -> Milliseconds:
    """`states`: (B, S, H)."""
    import torch

    durations: dict[str, list[float]] = {"no": [], "bf16": []}
    for _ in range(1 + pairs):
        for precision, milliseconds in durations.items():
            started = time.thread_time_ns()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = layer(states).float().square().mean()
            loss.backward()  # on a CPU in this thread
            layer.zero_grad()
            milliseconds.append((time.thread_time_ns() - started) / 1e6)
    # the first pass compiles kernels
    return {precision: round(min(each[1:]), 3) for precision, each in durations.items()}


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if name := re.search(r"model name\s*:\s*(.*)", info):
            return name[1]
    return platform.processor() or platform.machine()


def _machine() -> str:
    """Everything the times depend on."""
    import torch

    able = " ".join(sorted(key for key, value in torch.cpu.get_capabilities().items() if value is True))
    limits = " ".join(f"{key}={os.environ[key]}" for key in _LIMITS if key in os.environ)
    return f"{cpu_name()} ({able} {limits}), torch {torch.__version__}"
