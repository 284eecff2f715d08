"""`toolkit convert --to universal`: DeepSpeed loads it at every stage and world; its own tool writes the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.conftest import Made
from tests.checkpoint.deepspeed_worker import KINDS
from tests.checkpoint.handmade import same_bits
from tests.checkpoint.test_open_deepspeed import everything_of, read_reference, tensor_of
from tests.checkpoint.test_open_folders import write_run, write_slices, write_whole
from tests.runs import start
from toolkit.checkpoint.convert import universal
from toolkit.checkpoint.convert.run import Options
from toolkit.checkpoint.read.archive import open_archive
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.save import Draft, write
from toolkit.errors import UserError

pytestmark = pytest.mark.multiprocess
Tensors = dict[str, torch.Tensor]

# what is converted; every one also to another stage
SOURCES = ("zero1-bf16 x2", "zero2-bf16 x2", "zero3-bf16 x2", "zero1-groups x2", "zero2-groups x2", "zero3-groups x2",
           "zero1-fp16 x2", "zero2-frozen x2", "zero3-frozen x2", "zero1-frozen x2", "zero1-bf16-optimizer x2",
           "zero3-subgroups x2", "zero2-elastic x2", "zero2-round-robin x2", "zero2-aligned x3",
           "zero3-bf16 x3")  # fmt: skip
# world -> (engine that loads, what); worlds 1 and 3 differ from those that wrote
LOADS: dict[int, tuple[tuple[str, str], ...]] = {
    1: (("zero2-bf16", "zero2-bf16 x2"), ("zero3-bf16", "zero3-bf16 x3"), ("zero1-groups", "zero3-groups x2"),
        ("zero3-groups", "zero3-subgroups x2"), ("zero2-frozen", "zero3-frozen x2"), ("zero2-groups", "run")),
    2: (("zero1-bf16", "zero1-bf16 x2"), ("zero2-bf16", "zero2-bf16 x2"), ("zero3-bf16", "zero3-bf16 x2"),
        ("zero3-bf16", "zero3-bf16 x3"), ("zero2-aligned", "zero2-aligned x3")),
    3: (("zero1-bf16", "zero1-bf16 x2"), ("zero2-bf16", "zero2-bf16 x2"), ("zero3-bf16", "zero3-bf16 x2"),
        ("zero1-groups", "zero1-groups x2"), ("zero2-groups", "zero2-groups x2"), ("zero3-groups", "zero3-groups x2"),
        ("zero1-fp16", "zero1-fp16 x2"), ("zero2-frozen", "zero2-frozen x2"), ("zero3-frozen", "zero3-frozen x2"),
        ("zero1-bf16-optimizer", "zero1-bf16-optimizer x2"), ("zero3-groups", "zero2-groups x2"),
        ("zero2-groups", "zero3-groups x2"), ("zero2-elastic", "zero2-elastic x2"), ("zero3-frozen", "zero1-frozen x2"),
        ("zero2-in-order", "zero2-round-robin x2"), ("zero3-subgroups", "zero3-subgroups x2"), ("zero3-groups", "run")),
}  # fmt: skip
# what DeepSpeed loads of its own making, to compare the step after
PLAIN = ("zero1-bf16", "zero2-bf16", "zero3-bf16")


@dataclass(frozen=True)
class Loaded:
    """What an engine held after it had loaded a folder."""

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def convert(checkpoint: Path, out: Path, **options: object) -> list[str]:
    return universal.write(universal.plan(Options(checkpoint, out, **options)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def converted(deepspeed_checkpoints: dict[str, Made], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("universal")
    found = {name: root / name.replace(" ", "-") for name in SOURCES}
    for name, out in found.items():
        convert(deepspeed_checkpoints[name].folder, out, verify=True)
    found["run"] = root / "run"
    convert(run_of(deepspeed_checkpoints["zero2-groups x2"], root / "whole"), found["run"], verify=True)
    return found


def run_of(made: Made, folder: Path) -> Path:
    """A run's own checkpoint of one process with the tensors of one of DeepSpeed's."""
    truth = read_reference(made)
    moments = {key: tensor for key, tensor in truth.items() if key.startswith("exp_avg")}
    steps = {key.replace("exp_avg.", "step.", 1): torch.tensor(2.0) for key in moments if key.startswith("exp_avg.")}
    weights = {key.partition(".")[2]: tensor for key, tensor in truth.items() if key not in moments}
    return whole(folder, weights, {**moments, **steps}, [key[7:] for key in truth if key.startswith("buffer.")])


def whole(folder: Path, weights: Tensors, optimizer: Tensors, buffers: list[str]) -> Path:
    folder.mkdir()
    for name, tensors in (("weights", weights), ("optimizer", optimizer)):
        kept = {key: (value.clone(), tuple(value.shape)) for key, value in tensors.items()}
        write(Draft(f"{name}.safetensors", kept, {}), folder)
    known = {"state": "whole", "strategy": "single", "world": 1, "step": 2, "mixed_precision": "bf16"}
    return write_run(folder, buffers=buffers, **known)


@pytest.fixture(scope="module")
def loaded(
    converted: dict[str, Path], deepspeed_checkpoints: dict[str, Made], tiny_model: Path, tmp_path_factory: Any
) -> dict[tuple[int, str, str], Loaded]:
    """(world, engine, what) -> what the engine held. About 20 seconds, once."""
    jobs = {world: [(kind, name, converted[name]) for kind, name in pairs] for world, pairs in LOADS.items()}
    jobs[2] += [(kind, "plain", deepspeed_checkpoints[f"{kind} x2"].folder) for kind in PLAIN]
    root = tmp_path_factory.mktemp("loaded")
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda world: load(root / str(world), world, jobs[world], tiny_model), (3, 2, 1))
        return {key: value for result in results for key, value in result.items()}


def load(out: Path, world: int, jobs: list[tuple[str, str, Path]], model: Path) -> dict[tuple[int, str, str], Loaded]:
    out.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command = [*launcher, "-m", "tests.checkpoint.universal_worker", model, out]
    command += [f"{kind}={root}" for kind, _, root in jobs]
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOG_LEVEL": "error"}
    finished = start([str(word) for word in command], env=environment)
    assert finished.code == 0, finished.err[-5000:]
    found = {}
    for number, (kind, name, _) in enumerate(jobs):
        facts = json.loads((out / f"{number}.json").read_text())
        assert "error" not in facts, f"{kind} from {name}: {facts['error']}\n{facts['trace']}"
        found[world, kind, name] = Loaded(load_file(out / f"{number}.safetensors"), facts)
    return found


EVERY = [(world, kind, name) for world, pairs in LOADS.items() for kind, name in pairs]


@pytest.mark.parametrize(("world", "kind", "name"), EVERY)
def test_deepspeed_loads_it(
    world: int, kind: str, name: str, loaded: dict[Any, Loaded], deepspeed_checkpoints: dict[str, Made]
) -> None:
    found = loaded[world, kind, name]
    truth = read_reference(deepspeed_checkpoints["zero2-groups x2" if name == "run" else name])
    for key, tensor in truth.items():
        what, _, short = key.partition(".")
        held = found.tensors.get(key)
        if short == "nothing" or (what == "weight" and f"exp_avg.{short}" not in truth):
            continue  # without elements, or frozen: no master
        assert held is not None, key
        assert torch.equal(held.flatten(), tensor.flatten()), key
        if what == "weight":
            computing = found.tensors[f"compute.{short}"]
            assert torch.equal(computing, tensor.to(computing.dtype)), key
    assert {step for steps in found.facts["steps"] for step in steps} == {2.0}
    assert {step for steps in found.facts["next_steps"] for step in steps} == {3.0}
    assert found.facts["global_steps"] == 2


@pytest.mark.parametrize(("world", "kind", "name"), [key for key in EVERY if key[2] != "run"])
def test_every_group_keeps_its_settings(world: int, kind: str, name: str, loaded: dict[Any, Loaded]) -> None:
    groups = loaded[world, kind, name].facts["groups"]
    assert [group["weight_decay"] for group in groups] == [0.01 * number for number in range(KINDS[kind].groups)]
    # 0.5 is the script's, where the checkpoint does not hold it
    assert {group["lr"] for group in groups} == {0.5 if "elastic" in name else 0.01}


def test_frozen_parameters_and_buffers_are_the_scripts_to_load(loaded: dict[Any, Loaded]) -> None:
    """As docs/convert.md says: should DeepSpeed load them some day, the page and the notes can go."""
    for kind in ("zero2-frozen", "zero3-frozen"):
        found = loaded[3, kind, f"{kind} x2"].facts["restored_by_hand"]
        assert found == [
            "buffer.norm.batches",
            "buffer.norm.running_mean",
            "compute.first.bias",
            "compute.first.weight",
        ]


def test_stage_3_shares_one_step(loaded: dict[Any, Loaded]) -> None:
    """As docs/convert.md says: without what the worker does after loading, it is counted once per sub-group."""
    assert loaded[3, "zero3-groups", "zero3-groups x2"].facts["one_step"]
    assert not loaded[3, "zero2-groups", "zero2-groups x2"].facts["one_step"]


@pytest.mark.parametrize("kind", PLAIN)
def test_the_next_step_is_that_of_the_original(kind: str, loaded: dict[Any, Loaded]) -> None:
    one, other = loaded[2, kind, f"{kind} x2"].tensors, loaded[2, kind, "plain"].tensors
    names = [name for name in one if name.startswith("next.")]
    assert len(names) > 6
    assert [name for name in names if not torch.equal(one[name], other[name])] == []
    assert not torch.equal(one["next.weight.first.weight"], one["weight.first.weight"])


THEIRS = ("zero1-groups x2", "zero2-frozen x2", "zero3-groups x2", "zero3-subgroups x2")


@pytest.fixture(scope="module")
def by_deepspeed(deepspeed_checkpoints: dict[str, Made], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same by DeepSpeed's own tool."""
    root = tmp_path_factory.mktemp("theirs")
    found = {name: root / name.replace(" ", "-") for name in THEIRS}
    folders = [str(path) for name, out in found.items() for path in (deepspeed_checkpoints[name].tag, out)]
    finished = start([sys.executable, "-c", _BY_DEEPSPEED, *folders], env={"DS_ACCELERATOR": "cpu"})
    assert finished.code == 0, finished.err[-3000:]
    return found


# one worker of each sort: in this process
_BY_DEEPSPEED = """
import sys, types
from deepspeed.checkpoint.ds_to_universal import main
for tag, out in zip(sys.argv[1::2], sys.argv[2::2]):
    main(types.SimpleNamespace(input_folder=tag, output_folder=out + "/global_step2", num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True))
"""


@pytest.mark.parametrize("name", THEIRS)
def test_it_is_what_deepspeeds_own_tool_writes(
    name: str, converted: dict[str, Path], by_deepspeed: dict[str, Path]
) -> None:
    ours, theirs = converted[name], by_deepspeed[name]
    assert (ours / "latest_universal").read_text() == (theirs / "latest_universal").read_text()
    here, there = files_in(ours), files_in(theirs)
    # tied names, of which no loader asks for the second
    assert there - here <= {"global_step2/zero/head.weight/fp32.pt"}
    for path in sorted(here & there):
        if path.endswith("model_states.pt"):
            assert (ours / path).read_bytes() == (theirs / path).read_bytes(), path
        elif path.endswith("optimizer_state.pt"):
            compare_settings(torch_load(ours / path), torch_load(theirs / path))
        elif "zero" in path:
            compare(torch_load(ours / path), torch_load(theirs / path), path)


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def torch_load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def compare(ours: Any, theirs: Any, path: str) -> None:
    """At stage 3 theirs are flat and bare, elsewhere in a dictionary, as all of ours; whole numbers stay whole."""
    for one, other in ((ours, theirs),) if not isinstance(ours, dict) else ((ours["param"], theirs),):
        other = other["param"] if isinstance(other, dict) else other
        assert torch.equal(one.to(other.dtype).flatten(), other.flatten()), path
    if isinstance(theirs, dict):
        assert ours["param"].shape == theirs["param"].shape, path
        assert set(ours) == set(theirs), path


def compare_settings(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    count = len(theirs["param_groups"])
    assert ours["param_groups"][:count] == theirs["param_groups"]
    assert not any(ours["param_groups"][count:])
    for key in ("dynamic_loss_scale", "overflow", "ds_version", "partition_count", "zero_stage", "clip_grad"):
        assert key not in theirs or ours[key] == theirs[key], key
    assert vars(ours["loss_scaler"]) == vars(theirs["loss_scaler"])
    if "optimizer_state_dict" in theirs:
        inner, other = ours["optimizer_state_dict"], theirs["optimizer_state_dict"]
        assert inner["state"][0]["step"] == other["state"][0]["step"]
        first = other["param_groups"][0]
        assert inner["param_groups"] == [{**{k: v for k, v in first.items() if k != "weight_decay"}, "params": []}] or (
            inner["param_groups"] == [{**first, "params": []}]
        )


@pytest.mark.parametrize("name", ["zero1-bf16 x2", "zero3-frozen x2"])
def test_other_readers_take_the_files(name: str, converted: dict[str, Path]) -> None:
    for path in converted[name].rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    for path in converted[name].glob("*/zero/*/fp32.pt"):
        torch.load(path, weights_only=True, mmap=True)


@pytest.mark.parametrize("written", ["whole", "slices"])
def test_a_run_of_one_process_or_of_fsdp(written: str, tmp_path: Path) -> None:
    reader = write_whole(tmp_path / "run") if written == "whole" else write_slices(tmp_path / "run", 10)
    convert(reader, tmp_path / "out", verify=True)
    opened = open_checkpoint(reader)
    tag = (tmp_path / "out" / "latest_universal").read_text()
    for key, stored in everything_of(opened).items():
        kind, _, name = key.partition(".")
        file = "fp32" if kind in ("weight", "buffer") else kind
        found = torch_load(tmp_path / "out" / tag / "zero" / name / f"{file}.pt")["param"]
        assert same_bits(found, tensor_of(stored)), key
        if kind == "weight":
            step = torch_load(tmp_path / "out" / tag / "zero" / name / "step.pt")
            assert step.item() == opened.step_counts()[name]


def test_no_torch_little_memory_and_few_files(tmp_path: Path) -> None:
    """400 MB in a large tensor and many small ones, of which more files come than may be open at a time."""
    weights = {"large": torch.ones(30_000_001), **{f"small.{number}": torch.ones(10_001) for number in range(200)}}
    moments = {f"{key}.{name}": tensor for name, tensor in weights.items() for key in ("exp_avg", "exp_avg_sq")}
    reader = whole(tmp_path / "run", weights, moments, [])
    words = [sys.executable, "-c", _MEASURED, "convert", str(reader), str(tmp_path / "out"), "--to", "universal"]
    # the child's own peak: started by a shell, since a fork of this process would count this one's memory
    done = subprocess.run(["sh", "-c", 'ulimit -n 80; "$@"', "sh", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, peak, heavy = done.stdout.splitlines()[-1].split(" ", 2)
    assert heavy == "[]"
    assert int(peak) < 128, done.stdout


_MEASURED = """
import atexit, resource, sys
def report():
    heavy = sorted({'torch', 'deepspeed', 'transformers', 'safetensors'} & set(sys.modules))
    print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, heavy)
atexit.register(report)
from toolkit.cli import main
main()
"""


# faults


def test_without_moments_it_is_refused(deepspeed_checkpoints: dict[str, Made], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no optimizer state"):
        convert(deepspeed_checkpoints["zero0 x1"].folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["optim", "model"])
def test_a_flipped_byte_leaves_nothing(file: str, deepspeed_checkpoints: dict[str, Made], tmp_path: Path) -> None:
    shutil.copytree(deepspeed_checkpoints["zero2-bf16 x2"].folder, tmp_path / "in")
    path = next((tmp_path / "in" / "global_step2").glob(f"*{file}*.pt"))
    members = [member for name, member in open_archive(path).members.items() if "/data/" in name]
    damage(path, max(members, key=lambda member: member.size).offset)
    with pytest.raises(UserError, match=path.name):
        convert(tmp_path / "in", tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in"]


def damage(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["../up", "a/b", "..", "a\0b"])
def test_a_name_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    moments = {f"{key}.{name}": torch.ones(2) for key in ("exp_avg", "exp_avg_sq")}
    reader = whole(tmp_path / "run", {name: torch.ones(2)}, moments, [])
    with pytest.raises(UserError, match="name of a folder"):
        convert(reader, tmp_path / "out")


def test_the_output_is_known_and_replaced(converted: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(converted["zero2-bf16 x2"], out)
    for path in (out, out / "global_step2"):
        with pytest.raises(UserError, match="universal format"):
            open_checkpoint(path)
    reader = write_whole(tmp_path / "run")
    with pytest.raises(UserError, match="--overwrite"):
        convert(reader, out)
    convert(reader, out, overwrite=True)
    assert (out / "latest_universal").read_text() == "global_step4"


def test_what_is_said(deepspeed_checkpoints: dict[str, Made], tmp_path: Path) -> None:
    planned = universal.plan(Options(deepspeed_checkpoints["zero2-frozen x2"].folder, tmp_path / "out"))
    said = "\n".join(universal.described(planned))
    assert "2 frozen parameters and 3 buffers" in said
    assert "(weight_decay)" in said
    assert "one and the same step" in said
    assert not (tmp_path / "out").exists()
    assert "engine.load_checkpoint" in universal.write(planned)[-1]
    linked = {path.stat().st_ino: path.stat().st_size for path in (tmp_path / "out").rglob("*.pt")}
    assert sum(linked.values()) == planned.size
