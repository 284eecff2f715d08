"""Tests on GPUs (`make test-gpu`), with NCCL; one GPU is enough for most.

TOOLKIT_REHEARSE_GPU_TESTS=1 runs them on a CPU and gloo instead, to check the tests.
"""

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from tests import test_half_precision as half
from tests.jobs_worker import write_jobs
from tests.matrix import words_of
from tests.models.test_bigbird import batch, compare, fast, make
from tests.runs import begin, lines_of, losses_of, start, wait_for_steps
from toolkit.features.padding_free import attention as packing
from toolkit.features.padding_free.attention import Packed
from toolkit.models.bigbird import attention as ways

REHEARSAL = bool(os.environ.get("TOOLKIT_REHEARSE_GPU_TESTS"))
DEVICES = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not DEVICES and not REHEARSAL, reason="no GPU here (torch.cuda.device_count() is 0)"
    ),
]
COUNTS = sorted({1, min(2, DEVICES), DEVICES} - {0}) if not REHEARSAL else [1]
FILES = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp2")
WAYS: dict[str, tuple[list[str], list[str]]] = {  # name -> (words before the script, words after it)
    f"ddp x{count}": (["torchrun", "--standalone", "--nproc_per_node", str(count)], []) for count in COUNTS
} | {
    f"{name} x{count}": (
        [sys.executable], ["--config_file", f"accelerate_configs/{name}.yaml", "--num_processes", str(count)])
    for name in FILES for count in COUNTS
}  # fmt: skip
SETTINGS = ["--dropout", 0, "--report_to", "none", "--global_batch_size", 24, "--learning_rate", "2e-3",
            "--per_device_batch_size", 5, "--eval_every", 6, "--lr_scheduler_type", "constant"]  # fmt: skip
FULL, HALF = ["--max_steps", 12], ["--max_steps", 6, "--checkpoint_every", 6]
EXACT = ["--mixed_precision", "no"]


def run(folder: Path, way: str, jobs: list[list[Any]]) -> str:
    """Runs all jobs in one group of processes (`single`, or one of WAYS), and returns its standard error."""
    before, after = WAYS.get(way, ([sys.executable], []))
    # not from the fork server: a process that has used the GPU cannot be forked
    command = [*before, "tests/jobs_worker.py", write_jobs(folder, jobs), *after]
    return start(command, seconds=500, fresh=True).succeeded().err


def assert_on_devices(folder: Path) -> dict[str, Any]:
    world: dict[str, Any] = json.loads((folder / "config.json").read_text())["world"]
    assert REHEARSAL or not world["device"].startswith("cpu")  # "cpu (x86_64)"
    return world


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` has filled, once for all workers of pytest-xdist."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make(draft := root / f"{name}-draft")
            draft.rename(folder)
    return folder


@pytest.fixture(scope="module")
def cls(tiny_model: Path, reviews: Path) -> list[Any]:
    return ["recipes.cls", "--model_name_or_path", tiny_model, "--train_file", reviews, *SETTINGS]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, cls: list[Any]) -> Path:
    """One process, in float32: a whole run, and half of one."""

    def make(folder: Path) -> None:
        folder.mkdir()
        run(folder, "single", [[*cls, *EXACT, *FULL, "--output_dir", folder / "full"],
                               [*cls, *EXACT, *HALF, "--output_dir", folder / "half"]])  # fmt: skip
        assert_on_devices(folder / "full")

    return once(tmp_path_factory, "single", make)


@pytest.mark.parametrize("way", WAYS)
def test_a_strategy_trains_resumes_and_converts(
    way: str, cls: list[Any], single: Path, tmp_path: Path
) -> None:
    resumed = tmp_path / "resumed"
    shutil.copytree(single / "half", resumed, symlinks=True)  # `best` and `last` are links
    run(tmp_path, way, [[*cls, *EXACT, *FULL, "--checkpoint_every", 6, "--output_dir", tmp_path / "full"],
                        [*cls, *EXACT, *FULL, "--output_dir", resumed]])  # fmt: skip
    assert_on_devices(tmp_path / "full")
    expected = losses_of(single / "full")
    assert losses_of(tmp_path / "full") == pytest.approx(expected, rel=1e-4)
    assert losses_of(resumed) == pytest.approx(expected, rel=1e-4)
    for mine, theirs in zip(
        *(lines_of(each / "full" / "eval.jsonl") for each in (tmp_path, single)), strict=True
    ):
        assert mine["num_samples"] == theirs["num_samples"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    best, out = tmp_path / "full" / "checkpoints" / "best", tmp_path / "out"
    start([sys.executable, "-m", "toolkit", "convert", best, out]).succeeded()
    saved, converted = (
        load_file(each / "model.safetensors") for each in (tmp_path / "full" / "model", out)
    )
    assert saved.keys() == converted.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(converted[name].float(), tensor.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", ["single", *(name for name in WAYS if "offload" not in name)])
def test_the_precision_of_this_hardware(
    way: str, cls: list[Any], single: Path, tmp_path: Path
) -> None:
    """auto is bf16, fp16 or neither, by the GPU's capability; losses are close to those of float32."""
    jobs = [[*cls, *FULL, "--output_dir", tmp_path / "auto"]]
    if not REHEARSAL:
        jobs += [[*cls, *FULL, "--mixed_precision", "fp16", "--output_dir", tmp_path / "fp16"]]
    assert "mixed precision" in run(tmp_path, way, jobs)
    if DEVICES:
        capability = torch.cuda.get_device_capability()
        expected = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "no"
        assert assert_on_devices(tmp_path / "auto")["mixed_precision"] == expected
    for job in jobs:
        assert losses_of(Path(job[-1]))[:6] == pytest.approx(
            losses_of(single / "full")[:6], rel=0.05
        )


@pytest.fixture(scope="module")
def gradients(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path
) -> Callable[[str], Path]:
    """`gradients(way)` -> the folder with a step of SGD in fp32, in bf16, and with a learning rate near 0."""

    def make(way: str, folder: Path) -> None:
        folder.mkdir()
        settings = ["recipes.cls", *words_of(half.COMMON), "--per_device_batch_size", 3]
        jobs = [[*settings, *half.GRADIENT, "--mixed_precision", precision, "--output_dir", folder / precision]
                for precision in ("no", "bf16")]  # fmt: skip
        jobs.append(
            [*settings, *half.STILL, "--mixed_precision", "no", "--output_dir", folder / "still-1"]
        )
        run(folder, way, jobs)

    return lambda way: once(tmp_path_factory, f"gradients {way}", functools.partial(make, way))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_bf16(way: str, gradients: Callable[[str], Path]) -> None:
    single, mine = gradients("single"), gradients(way)
    errors = [
        half.gradient_error(each / "bf16", single / "no", single / "still-1")
        for each in (mine, single)
    ]
    assert errors[0] < 1.5 * errors[1]


def run_skipping(folder: Path, way: str) -> None:
    """A run, and one that resumes from its checkpoint after the first skipped step."""
    whole = ["tests.fp16_jobs", *words_of(half.FP16), "--output_dir", folder / "whole"]
    saved = half.saved_before_a_skip(folder / "whole")
    run(folder, way, [whole, [*whole[:-1], folder / "resumed", "--resume", saved]])


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        folder.mkdir()
        run_skipping(folder, "single")

    return once(tmp_path_factory, "fp16", make)


@pytest.mark.parametrize("way", ["single", *WAYS])
def test_fp16_skips_a_step(way: str, skipping: Path, tmp_path: Path) -> None:
    """During warmup, on all ranks; the gradient overflows on one of them."""
    folder = skipping if way == "single" else tmp_path
    if way != "single":
        run_skipping(folder, way)
    assert assert_on_devices(folder / "whole")["mixed_precision"] == "fp16"
    half.assert_skipped(folder / "whole", skipping / "whole", 0)
    half.assert_skipped(folder / "resumed", skipping / "whole", half.SAVED_AT)


@pytest.mark.parametrize("way", ["single", *(name for name in WAYS if "offload" not in name)])
def test_the_other_recipes(
    way: str, tiny_model: Path, long_reviews: Path, articles: Path, tmp_path: Path
) -> None:
    """Sparse attention at more than eight widths, in micro-batches that fit, and titles."""
    more = ["--model_name_or_path", tiny_model, *SETTINGS, "--max_steps", 8, "--eval_every", 8]
    run(tmp_path, way, [
        ["recipes.bigbird", "--train_file", long_reviews, *more, "--max_length", 1536, "--per_device_batch_size",
         "auto", "--output_dir", tmp_path / "b"],
        ["recipes.title", "--train_file", articles, *more, "--output_dir", tmp_path / "t"],
    ])  # fmt: skip
    for name in "bt":
        assert_on_devices(tmp_path / name)
        assert all(torch.tensor(losses_of(tmp_path / name)).isfinite())
        assert lines_of(tmp_path / name / "eval.jsonl")


@pytest.mark.skipif(not DEVICES, reason="flex_attention has no backward pass on a CPU")
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


@pytest.mark.skipif(not DEVICES, reason="flex_attention has no backward pass on a CPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bigbird_has_a_kernel_in_half_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own tiles of the backward pass depend on GPU, precision and head size."""
    monkeypatch.setattr(ways, "_compiles", {})
    for size in (32, 64, 128):
        reference = make(hidden_size=2 * size, sharpness=5).to("cuda", dtype)
        inputs = {name: value.cuda() for name, value in batch(1024, "right").items()}
        compare(fast(reference, "flex"), fast(reference, "gathered"), inputs, 0.05, 0.05)
    assert [*ways._compiles.values()] == [True] * 3


@pytest.mark.skipif(
    not DEVICES or torch.cuda.get_device_capability() < (8, 0),
    reason="flash attention needs Ampere",
)
@pytest.mark.parametrize(("window", "first_only"), [(60, False), (8, False), (60, True)])
def test_packed_texts_by_varlen_attn(window: int, first_only: bool) -> None:
    """Outputs and gradients of the kernel are those of padded attention."""
    lengths, cuda = (60, 33, 5, 1), torch.device("cuda")
    places = torch.cat([torch.arange(length) + 60 * row for row, length in enumerate(lengths)]).to(
        cuda
    )
    packed = Packed(
        lengths, 4, 60, torch.tensor([0, 60, 93, 98, 99], dtype=torch.int32, device=cuda), places
    )
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


def test_a_killed_run_resumes(cls: list[Any], tmp_path: Path) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    settings = [*cls[1:], *EXACT, "--max_steps", 60, "--checkpoint_every", 4]
    command = [sys.executable, "recipes/cls.py", *settings, "--output_dir"]
    start([*command, uninterrupted]).succeeded()
    process = begin([*command, killed])
    wait_for_steps(killed, 10)
    process.kill_session()
    assert len(losses_of(killed)) < 60
    start([*command, killed]).succeeded()
    # kernels of attention's backward pass add in any order, which 60 steps magnify
    assert losses_of(killed) == pytest.approx(losses_of(uninterrupted), rel=1e-3)


def test_prediction(single: Path, reviews: Path, tmp_path: Path) -> None:
    """`toolkit predict` on a GPU gives the probabilities of the run's last evaluation."""
    out = tmp_path / "out.jsonl"
    shutil.copy(reviews, tmp_path / "rows.csv")
    words = ["predict", single / "full" / "model", tmp_path / "rows.csv", "--output", out]
    start([sys.executable, "-m", "toolkit", *words]).succeeded()
    answers = lines_of(out)
    assert len(answers) == 211
    for line in lines_of(single / "full" / "predictions.jsonl"):
        answer = answers[line["id"]]
        row = [answer[f"probability_{name}"] for name in ("neg", "pos")]
        assert row == pytest.approx(line["probabilities"], abs=1e-4)


@pytest.fixture(scope="module")
def wide_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_model`, whose heads of size 11 have no fused kernel of any attention, with heads of 32."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(tiny_model, folder)
    config = BertConfig.from_pretrained(
        folder, hidden_size=64, num_attention_heads=2, intermediate_size=128
    )
    BertModel(config).save_pretrained(folder)
    return folder


def test_techniques(wide_model: Path, reviews: Path, long_reviews: Path, tmp_path: Path) -> None:
    """In the precision of this hardware, with fused kernels of attention."""
    cls = ["recipes.cls", "--model_name_or_path", wide_model, "--train_file", reviews, *SETTINGS]
    sparse = ["recipes.bigbird", *cls[1:], "--train_file", long_reviews, "--max_length", 1536]
    jobs: dict[str, list[Any]] = {
        "packed": [*cls, "--padding_free"],
        "terms": [*cls, "--r_drop_alpha", 1, "--fgm_epsilon", 0.5, "--ema_decay", 0.9],
        "lora": [*cls, "--lora_r", 4, "--gradient_checkpointing"],
        "sparse": [*sparse, "--fgm_epsilon", 0.5],
        "sparse-recomputed": [*sparse, "--gradient_checkpointing"],
        **{name: [*cls, "--optimizer", name] for name in ("adafactor", "sgd")},
    }
    if not REHEARSAL:  # minutes of a C++ compiler
        jobs["compiled"] = [*cls, "--torch_compile", "--fgm_epsilon", 0.5]
    stop = ["--max_steps", 4, "--eval_every", 4]
    log = run(
        tmp_path,
        "single",
        [[*job, *stop, "--output_dir", tmp_path / name] for name, job in jobs.items()],
    )
    assert "flex_attention has no kernel" not in log
    for name in jobs:
        assert_on_devices(tmp_path / name)
        assert all(torch.tensor(losses_of(tmp_path / name)).isfinite())
        assert lines_of(tmp_path / name / "eval.jsonl")


def test_compiled_layers(cls: list[Any], single: Path, tmp_path: Path) -> None:
    run(
        tmp_path,
        "single",
        [[*cls, *EXACT, *FULL, "--torch_compile", "--output_dir", tmp_path / "run"]],
    )
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(single / "full"), rel=1e-4)
