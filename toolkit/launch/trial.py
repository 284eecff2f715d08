"""Measures whether this CPU trains faster in fp32 or bf16, on one layer of the model's width, once per machine.

Its instruction sets do not tell: with avx512_bf16 and no AMX an AMD EPYC trained twice as fast in bf16, and a Xeon took
1.4 times as long (benchmarks/results/precision_trial.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.utils.files import cache_folder, replace_file

if TYPE_CHECKING:
    import torch

Widths = tuple[int, int]
"""(hidden_size, intermediate_size) of a layer."""
Milliseconds = dict[str, float]
"""Of a forward and backward pass of the layer, by precision: no, bf16."""

BERT_BASE: Widths = (768, 3072)
# bf16 must be this many times as fast to be worth its rounding
MIN_SPEEDUP = 1.1
_TEXTS, _LENGTH, _PAIRS = 2, 128, 2
# variables that limit the instructions oneDNN and torch use
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
# If bf16 takes this many times as long on a few tokens, it is emulated, and the full trial would take minutes.
_PROBE_TOKENS, _EMULATED_RATIO = 16, 3.0


def measure_cached(widths: Widths) -> Milliseconds:
    """`measure`, cached per machine; one process of a machine measures."""
    from filelock import FileLock

    facts = f"{_machine()}, {widths[0]} x {widths[1]}"
    path = cache_folder() / "precision" / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(OSError):  # no cache can be written: each process measures
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                return {name: float(json.loads(path.read_bytes())[name]) for name in ("no", "bf16")}
            milliseconds = measure(widths)
            with replace_file(path, flush=False) as draft:
                draft.write_text(json.dumps({"of": facts, **milliseconds}), encoding="utf-8")
            return milliseconds
    return measure(widths)


def slowest_times(trials: Iterable[Milliseconds | None]) -> Milliseconds:
    """Over the ranks that measured: a step takes as long as its slowest rank."""
    measurements = [trial for trial in trials if trial]
    return {name: max(trial[name] for trial in measurements) for name in ("no", "bf16")}


def faster_precision(milliseconds: Milliseconds) -> str:
    """The precision to compute in."""
    return "bf16" if milliseconds["no"] >= MIN_SPEEDUP * milliseconds["bf16"] else "no"


def describe(milliseconds: Milliseconds) -> str:
    return "a layer of this width took {no:.3g} ms in fp32 and {bf16:.3g} ms in bf16 on this CPU".format(**milliseconds)


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
    return {
        precision: round(min(each[1:]), 3) for precision, each in durations.items()
    }  # the first pass compiles kernels


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
