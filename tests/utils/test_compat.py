"""What the processes of a run must have in common, and what to type where they do not (promise 5). The private names of
docs/compatibility.md that no other test would miss without a GPU are in the installed packages."""

import importlib.metadata
import importlib.util
import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.faults import refusal
from tests.runs import ROOT, start
from toolkit.utils import versions
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


Patch = pytest.MonkeyPatch


def install(package: str, version: str, folder: Path, monkeypatch: Patch) -> None:
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


def test_allowed_libraries(tmp_path: Path, monkeypatch: Patch) -> None:
    install("peft", "0.99", tmp_path, monkeypatch)
    install("torch", "2.13.0a0+5.nv26.3", tmp_path, monkeypatch)  # of NVIDIA's containers
    install("deepspeed", "0.19.6", tmp_path, monkeypatch)  # this run may not need it
    versions.check_requirements()


def test_an_older_library_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    install("deepspeed", "0.19.6", tmp_path, monkeypatch)
    says = ["deepspeed 0.19.6", "pip install 'deepspeed<"]
    refusal(versions.check_requirements, "deepspeed", says=says)
    install("peft", "0.10.1", tmp_path, monkeypatch)
    # before the imports, which would fail
    code = "from toolkit import launch; launch.run(print)"
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    start([sys.executable, "-c", code], env=path).says_in_one_line("peft 0.10.1", "pip install")


def test_code_digest_of_the_recipe_and_any_module(tmp_path: Path, monkeypatch: Patch) -> None:
    package, recipe = tmp_path / "toolkit", tmp_path / "recipe.py"
    (package / "launch").mkdir(parents=True)
    monkeypatch.setattr(versions, "_ROOT", package)
    digests = set()
    for file in (package / "a.py", package / "launch" / "b.py", recipe):
        for text in ("a = 1\n", "b = 2\r\n"):
            file.write_text(text)
            digests.add(versions.code_digest(recipe))
    assert len(digests) == 6
