"""Tests on GPUs (`make test-gpu`), with NCCL; one GPU is enough for most.

TOOLKIT_REHEARSE_GPU_TESTS=1 runs them on a CPU and gloo instead, to check the tests.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from tests import inputs
from tests import test_half_precision as half
from tests.jobs_worker import write_jobs
from tests.matrix import words_of
from tests.models.test_bigbird import batch, compare, fast, make
from tests.runs import lines_of, losses_of, start
from toolkit.features.padding_free import attention as packing
from toolkit.features.padding_free.attention import Packed
from toolkit.models.bigbird import attention as ways

REHEARSAL = bool(os.environ.get("TOOLKIT_REHEARSE_GPU_TESTS"))
DEVICES = torch.cuda.device_count()
CAPABILITY = torch.cuda.get_device_capability() if DEVICES else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICES and not REHEARSAL, reason="torch.cuda.device_count() is 0"),
]
ON_A_GPU = pytest.mark.skipif(not DEVICES, reason="flex_attention has no backward pass on a CPU")
COUNTS = sorted({1, min(2, DEVICES), DEVICES} - {0}) if not REHEARSAL else [1]
FILES = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp2")
WAYS: dict[str, tuple[list[str], list[str]]] = {}  # name -> (words before the script, after it)
for count in map(str, COUNTS):
    WAYS[f"ddp x{count}"] = (["torchrun", "--standalone", "--nproc_per_node", count], [])
    for file in FILES:
        words = ["--config_file", f"accelerate_configs/{file}.yaml", "--num_processes", count]
        WAYS[f"{file} x{count}"] = ([sys.executable], words)
NOT_OFFLOADED = [way for way in WAYS if "offload" not in way]
SETTINGS = ["--dropout", 0, "--report_to", "none", "--global_batch_size", 24, "--learning_rate", "2e-3",
            "--per_device_batch_size", 5, "--eval_every", 6, "--lr_scheduler_type", "constant"]  # fmt: skip
DATA = ["--model_name_or_path", inputs.tiny_model, "--train_file", inputs.reviews]
CLS = ["recipes.cls", *DATA, *SETTINGS]
FULL, HALF = ["--max_steps", 12], ["--max_steps", 6, "--checkpoint_every", 6]
EXACT = ["--mixed_precision", "no"]


def run(folder: Path, way: str, jobs: Mapping[str, Sequence[Any]]) -> str:
    """Runs all jobs (the name of a run's folder -> its words) in one group of processes (`single`, or one of WAYS) and
    returns its standard error. Not from the fork server: a process that has used the GPU cannot be forked."""
    before, after = WAYS.get(way, ([sys.executable], []))
    words = [[*words_of(job), "--output_dir", folder / name] for name, job in jobs.items()]
    command = [*before, "tests/jobs_worker.py", write_jobs(folder, words), *after]
    err = start(command, seconds=500, fresh=True).succeeded().err
    for name in jobs:
        device = world_of(folder / name)["device"]
        assert REHEARSAL or not device.startswith("cpu")  # "cpu (x86_64)"
    return err


def world_of(folder: Path) -> dict[str, Any]:
    world: dict[str, Any] = json.loads((folder / "config.json").read_text())["world"]
    return world


@pytest.fixture(scope="module")
def single() -> Path:
    """One process, in float32: a whole run, and half of one."""
    jobs = {"full": [*CLS, *EXACT, *FULL], "half": [*CLS, *EXACT, *HALF]}
    return inputs.shared("gpu single", lambda folder: run(folder, "single", jobs))


@pytest.mark.parametrize("way", WAYS)
def test_a_strategy_trains_resumes_and_converts(way: str, single: Path, tmp_path: Path) -> None:
    # `best` and `last` are links
    shutil.copytree(single / "half", tmp_path / "resumed", symlinks=True)
    full = [*CLS, *EXACT, *FULL]
    run(tmp_path, way, {"full": [*full, "--checkpoint_every", 6], "resumed": full})
    for name in ("full", "resumed"):
        assert losses_of(tmp_path / name) == pytest.approx(losses_of(single / "full"), rel=1e-4)
    mine, theirs = (lines_of(each / "full" / "eval.jsonl") for each in (tmp_path, single))
    for key in ("num_samples", "loss"):
        values = [line[key] for line in theirs]
        assert [line[key] for line in mine] == pytest.approx(values, rel=1e-4)
    toolkit = [sys.executable, "-m", "toolkit"]
    start([*toolkit, "convert", tmp_path / "full/checkpoints/best", tmp_path / "out"]).succeeded()
    folders = (tmp_path / "out", tmp_path / "full" / "model")
    converted, saved = (load_file(each / "model.safetensors") for each in folders)
    torch.testing.assert_close(converted, saved, rtol=1e-6, atol=1e-7)
    shutil.copy(inputs.reviews(), tmp_path / "rows.csv")
    words = ["predict", folders[0], tmp_path / "rows.csv", "--output", tmp_path / "out.jsonl"]
    start([*toolkit, *words]).succeeded()
    answers = lines_of(tmp_path / "out.jsonl")
    assert len(answers) == 211
    for line in lines_of(tmp_path / "full" / "predictions.jsonl"):
        row = [answers[line["id"]][f"probability_{name}"] for name in ("neg", "pos")]
        assert row == pytest.approx(line["probabilities"], abs=1e-4)


@pytest.mark.parametrize("way", ["single", *NOT_OFFLOADED])
def test_the_precision_of_this_hardware(way: str, single: Path, tmp_path: Path) -> None:
    """auto is bf16, fp16 or neither, by the GPU's capability; losses are close to those of float32."""
    jobs = {"auto": [*CLS, *FULL]}
    if not REHEARSAL:
        jobs["fp16"] = [*CLS, *FULL, "--mixed_precision", "fp16"]
    assert "mixed precision" in run(tmp_path, way, jobs)
    expected = "bf16" if CAPABILITY >= (8, 0) else "fp16" if CAPABILITY >= (7, 0) else "no"
    assert REHEARSAL or world_of(tmp_path / "auto")["mixed_precision"] == expected
    for name in jobs:
        losses = losses_of(single / "full")[:6]
        assert losses_of(tmp_path / name)[:6] == pytest.approx(losses, rel=0.05)


def half_precision(way: str) -> Path:
    """Runs of a step of SGD in fp32, in bf16 and with a learning rate near 0; one in fp16 that skips steps, and one
    that resumes from its checkpoint after the first skipped step."""

    def make(folder: Path) -> None:
        words = ["recipes.cls", *half.COMMON, "--per_device_batch_size", 3, "--mixed_precision"]
        jobs = {precision: [*words, precision, *half.GRADIENT] for precision in ("no", "bf16")}
        jobs |= {
            "still": [*words, "no", *half.STILL],
            "skips": ["tests.test_half_precision", *half.FP16],
        }
        saved = half.saved_before_a_skip(folder / "skips")
        run(folder, way, jobs | {"resumed": [*jobs["skips"], "--resume", saved]})

    return inputs.shared(f"gpu half precision {way}", make)


@pytest.mark.parametrize("way", ["single", *WAYS])
def test_gradients_in_bf16_and_skipped_steps_in_fp16(way: str) -> None:
    """The gradient overflows during warmup, on one of the ranks."""
    mine, single = half_precision(way), half_precision("single")
    exact, still = single / "no", single / "still"
    error, usual = (half.gradient_error(each / "bf16", exact, still) for each in (mine, single))
    assert error <= 1.5 * usual
    assert world_of(mine / "skips")["mixed_precision"] == "fp16"
    half.assert_skipped(mine / "skips", single / "skips", 0)
    half.assert_skipped(mine / "resumed", single / "skips", half.SAVED_AT)


def wide_model() -> Path:
    """As `tiny_model`, whose heads of size 11 have no fused kernel of any attention, with heads of 32."""

    def make(folder: Path) -> None:
        shutil.copytree(inputs.tiny_model(), folder, dirs_exist_ok=True)
        sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
        BertModel(BertConfig.from_pretrained(folder, **sizes)).save_pretrained(folder)

    return inputs.shared("wide-bert", make)


@pytest.mark.parametrize("way", ["single", *NOT_OFFLOADED])
def test_other_recipes_and_techniques(way: str, tmp_path: Path) -> None:
    """Sparse attention at more than eight widths, in micro-batches that fit; titles; in one process techniques, too."""
    cls = [*CLS, "--model_name_or_path", wide_model, "--max_steps", 4, "--eval_every", 4]
    long = ["--train_file", inputs.long_split("train"), "--max_length", 1536]
    sparse = ["recipes.bigbird", *cls[1:], *long, "--max_steps", 8]
    titles = ["recipes.title", *DATA[:2], *SETTINGS, "--train_file", inputs.titles("train")]
    jobs = {"sparse": [*sparse, "--per_device_batch_size", "auto"]}
    jobs["titles"] = [*titles, "--max_steps", 4, "--eval_every", 4]
    if way == "single":
        jobs["packed"] = [*cls, "--padding_free"]
        jobs["terms"] = [*cls, "--r_drop_alpha", 1, "--fgm_epsilon", 0.5, "--ema_decay", 0.9]
        jobs["lora"] = [*cls, "--lora_r", 4, "--gradient_checkpointing"]
        jobs["sparse-fgm"] = [*sparse, "--fgm_epsilon", 0.5]
        jobs["sparse-recomputed"] = [*sparse, "--gradient_checkpointing"]
        jobs["adafactor"] = [*cls, "--optimizer", "adafactor"]
        if not REHEARSAL:  # minutes of a C++ compiler
            jobs["compiled"] = [*cls, "--torch_compile", "--fgm_epsilon", 0.5]
    assert "flex_attention has no kernel" not in run(tmp_path, way, jobs)


@ON_A_GPU
@pytest.mark.parametrize("attention", ["flex", "gathered"])
@pytest.mark.parametrize("training", [True, False])
def test_bigbird_at_many_widths(training: bool, attention: str) -> None:
    """More shapes than the 129 at which a run has failed; beyond torch's limit of eight, flex_attention would build
    dense scores."""
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = make(training=training, hidden_size=64, sharpness=5).cuda()
    model = fast(reference, attention)
    shapes = [(samples, width) for width in range(768, 4097, 64) for samples in (1, 2, 7)]
    assert len(shapes) == 159
    for samples, width in shapes:
        padding = "none" if samples == 1 else "both" if width % 128 else "right"
        inputs = {name: value.cuda() for name, value in batch(width, padding, samples).items()}
        compare(model, reference, inputs, 1e-4, 1e-4)
    if attention == "flex":
        assert all(ways._compiles.values())
        assert 6 <= len(ways._compiles) <= 18


@ON_A_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bigbird_has_a_kernel_in_half_precision(dtype: torch.dtype, monkeypatch: Any) -> None:
    """torch's own tiles of the backward pass depend on GPU, precision and head size."""
    monkeypatch.setattr(ways, "_compiles", {})
    for size in (32, 64, 128):
        reference = make(hidden_size=2 * size, sharpness=5).to("cuda", dtype)
        inputs = {name: value.cuda() for name, value in batch(1024, "right").items()}
        compare(fast(reference, "flex"), fast(reference, "gathered"), inputs, 0.05, 0.05)
    assert [*ways._compiles.values()] == [True] * 3


@pytest.mark.skipif(CAPABILITY < (8, 0), reason="flash attention needs Ampere")
@pytest.mark.parametrize(("window", "first_only"), [(60, False), (8, False), (60, True)])
def test_packed_texts_by_varlen_attn(window: int, first_only: bool) -> None:
    """Outputs and gradients of the kernel are those of padded attention."""
    lengths, cuda = (60, 33, 5, 1), torch.device("cuda")
    places = torch.cat([torch.arange(length) + 60 * row for row, length in enumerate(lengths)])
    ends = torch.tensor([0, 60, 93, 98, 99], dtype=torch.int32, device=cuda)
    packed = Packed(lengths, 4, 60, ends, places.to(cuda))
    states = torch.randn(3, 99, 4, 32, device=cuda, dtype=torch.bfloat16)
    q, k, v = states[0, packed.first_tokens] if first_only else states[0], states[1], states[2]

    def compute(*states: Any) -> tuple[torch.Tensor]:
        return (F.scaled_dot_product_attention(*states, scale=0.2).transpose(1, 2),)

    results = []
    for attend, how in ((packing._varlen, 0.2), (packing._padded, compute)):
        inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        output = attend(*inputs, packed, window, how)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)
