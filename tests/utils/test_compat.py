"""The private names of docs/compatibility.md that no other test would miss without a GPU are in the installed packages;
the error for a missing one names it."""

import importlib.metadata
import importlib.util
import re
import types
from pathlib import Path

import pytest
import torch

from tests.faults import refusal
from toolkit.utils.compat import TESTED, require

# module (not imported) -> names that its source must contain: used on GPUs, or only set
NAMES = {
    "torch._dynamo.exc": ("FailOnRecompileLimitHit", "TorchDynamoException"),
    "torch._functorch.config": ("force_non_lazy_backward_lowering", "donated_buffer"),
    "torch._inductor.choices": ("get_flex_attention_bwd_configs",),
    "torch._inductor.virtualized": ("set_choices_handler",),
    "torch.amp.grad_scaler": ("_step_supports_amp_scaling",),
    "deepspeed.ops": ("__compatible_ops__",),
}


@pytest.mark.parametrize("module", NAMES)
def test_installed_packages_have_the_private_names(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{module} is gone"
    source = Path(str(spec.origin)).read_text(encoding="utf-8")
    assert [name for name in NAMES[module] if not re.search(rf"\b{name}\b", source)] == []


def test_require() -> None:
    assert require(torch.distributed, "distributed_c10d._world", "torch") is not None
    gone = types.SimpleNamespace(__name__="deepspeed.comm.torch")
    version = importlib.metadata.version("deepspeed")
    says = [f"deepspeed {version} has no deepspeed.comm.torch.build_shm_op"]
    says.append(f"pip install 'deepspeed=={TESTED['deepspeed']}'")
    refusal(require, gone, "build_shm_op", "deepspeed", says=says)
