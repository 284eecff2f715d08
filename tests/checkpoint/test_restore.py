"""toolkit/checkpoint/{live,save,restore}.py in one process: a round trip, and what is refused before any change."""

import dataclasses
import json
import random
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.checkpoint.handmade import assert_same, save_state
from tests.faults import refusal
from toolkit.checkpoint import live, machines
from toolkit.checkpoint import restore as restoring
from toolkit.checkpoint.live import LiveState, live_state
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.restore import restore
from toolkit.checkpoint.save import Draft, random_states, set_random_states, write
from toolkit.checkpoint.tensor_index import CheckpointReader


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.alias = self.embed  # a module under two names
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.brief = nn.Parameter(torch.randn(3, 3).bfloat16())
        self.small = nn.Parameter(torch.randn(2).half())
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("mean", torch.randn(4).bfloat16())
        self.register_buffer("wide", torch.randn(2, dtype=torch.float64))
        self.register_buffer("forgotten", torch.ones(3), persistent=False)
        self.one, self.two = nn.Module(), nn.Module()
        shared = torch.arange(6)
        self.one.register_buffer("table", shared)
        self.two.register_buffer("table", shared)

    def forward(self) -> torch.Tensor:
        hidden = self.head(self.embed(torch.arange(5))) * self.scalar
        half = (self.brief.float() ** 3).sum() + (self.small.float() ** 2).sum()
        return (hidden**2).mean() + half + self.nothing.sum()


ACCELERATOR: Any = SimpleNamespace(distributed_type=DistributedType.NO)


def trained(seed: int, steps: int = 3) -> LiveState:
    torch.manual_seed(seed)
    model = Awkward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.count += 1
    return live_state(ACCELERATOR, model, optimizer)


def save(state: LiveState, folder: Path, without: Collection[str] = (), **manifest: Any) -> CheckpointReader:
    save_state(state, folder, 3, without=without, **manifest)
    return open_checkpoint(folder)


def snapshot(state: LiveState) -> dict[str, torch.Tensor]:
    actual = {name: tensor.clone() for name, tensor in state.module.state_dict().items()}
    for part in state.fragments():
        for key, value in {**part.state.elements, **part.state.factors, **part.state.scalars}.items():
            actual[f"{key}.{part.name}"] = torch.as_tensor(-1 if value is None else value).clone()
    return actual


@pytest.mark.parametrize("block", [4, restoring._BLOCK])
def test_there_and_back(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "_BLOCK", block)
    saved = trained(1)
    reader = save(saved, tmp_path / "one")
    fresh = trained(2, steps=5)
    restore(fresh, reader, 3)
    assert_same(snapshot(fresh), snapshot(saved))
    fresh.module.alias.weight.data[0] = 9.0
    assert fresh.module.head.weight[0, 0] == 9.0  # still tied


def test_excluded_parameters_keep_the_base_models_values(tmp_path: Path) -> None:
    saved, fresh = trained(1), trained(2)
    reader = save(saved, tmp_path / "one", {"frozen"}, excluded={"frozen": [7]})
    assert "frozen" not in reader.weights
    before = fresh.module.frozen.clone()
    restore(fresh, reader, 3)
    assert torch.equal(fresh.module.frozen, before)
    assert torch.equal(fresh.module.embed.weight, saved.module.embed.weight)


def refused(fresh: LiveState, reader: CheckpointReader) -> str:
    """The error of a restore, which must have changed nothing."""
    before = snapshot(fresh)
    message = refusal(restore, fresh, reader, 3)
    assert_same(snapshot(fresh), before)
    return message


def frozen_parameter(name: str, size: int) -> Callable[[Any], None]:
    return lambda model: model.register_parameter(name, nn.Parameter(torch.ones(size), requires_grad=False))


CHANGES: dict[str, Any] = {
    "lacks extra, which the model has": frozen_parameter("extra", 2),
    "has frozen, which the model lacks": lambda model: delattr(model, "frozen"),
    "frozen has shape [7], and [8] in the model": frozen_parameter("frozen", 8),
    "mask has shape [3], and [2] in the model": lambda model: model.register_buffer("mask", torch.ones(2).bool()),
    "has no optimizer state for frozen, which was frozen": lambda model: model.frozen.requires_grad_(True),
}


@pytest.mark.parametrize("message", CHANGES)
def test_another_model_is_refused(tmp_path: Path, message: str) -> None:
    fresh = trained(2)
    reader = save(trained(1), tmp_path / "one", frozen=["frozen"])
    CHANGES[message](fresh.module)
    answer = refused(fresh, reader)
    assert str(tmp_path / "one") in answer
    assert message in answer


@pytest.mark.parametrize("before", [True, False])
def test_another_tie_is_refused(before: bool, tmp_path: Path) -> None:
    tied, untied = trained(1), trained(2)
    untied.module.head.weight = nn.Parameter(torch.ones(5, 3))
    fresh, saved = (untied, tied) if before else (tied, untied)
    answer = refused(fresh, save(saved, tmp_path / "one"))
    assert f"has {'one weight' if before else 'two weights'} for embed.weight and head.weight" in answer


def test_different_steps_are_restored_but_not_under_zero(tmp_path: Path) -> None:
    saved = trained(1)
    for part in saved.fragments():
        if part.name == "scalar":
            part.state.scalars["step"].fill_(1.0)
    fresh, reader = trained(2), save(saved, tmp_path / "one")
    restore(fresh, reader, 3)
    steps = {part.name: part.state.scalars.get("step") for part in fresh.fragments()}
    assert (steps["scalar"], steps["brief"]) == (1.0, 3.0)
    # ZeRO has one count
    message = refused(Flattened(trained(2)), reader)
    assert "scalar and brief differ in step (1.0 and 3.0), and ZeRO has one for both" in message


class Flattened(LiveState):
    """As ZeRO's state, for the checks of a restore."""

    file_format, strategy = "deepspeed", "zero2"

    def __init__(self, whole: LiveState) -> None:
        super().__init__(whole.module, whole.optimizer)
        self.names = [name for name, parameter in whole.module.named_parameters() if parameter.requires_grad]

    def optimizer_tensors(self) -> Any:
        yield torch.zeros(1), self.names


def test_a_parameter_that_was_saved_under_its_other_name(tmp_path: Path) -> None:
    """As by DeepSpeed, or another version of the model's class."""
    saved, fresh = trained(1), trained(2)
    reader = save(saved, tmp_path / "one")
    parts, other = ("weights", "optimizer_state", "optimizer_scalars"), {"embed.weight": "head.weight"}
    renamed = {part: {other.get(name, name): value for name, value in getattr(reader, part).items()} for part in parts}
    tied = {"embed.weight": "head.weight", "alias.weight": "head.weight"}
    restore(fresh, dataclasses.replace(reader, **renamed, tied=tied), 3)
    assert_same(snapshot(fresh), snapshot(saved))


@pytest.mark.parametrize(("stage", "message"), [(0, "ZeRO stage 0 in bf16 or fp16"), (3, "offloaded to NVMe")])
def test_masters_and_moments_that_deepspeed_does_not_save(stage: int, message: str) -> None:
    plugin = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, state=plugin)
    engine = SimpleNamespace(optimizer=SimpleNamespace(fp16_groups=[], swap_optimizer=stage == 3))
    refusal(live_state, accelerator, engine, match=message)


class Replicated(nn.Parameter):
    placements = (Replicate(), Shard(0))


def test_hybrid_sharding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would save its replica, and the shards would not fit."""
    monkeypatch.setattr(live, "DTensor", Replicated)
    model = nn.Linear(2, 2)
    model.weight = Replicated(torch.ones(2, 2))
    refusal(live_state, ACCELERATOR, model, torch.optim.SGD(model.parameters()), match=r"weight is sharded as \(Repl")


def test_random_states_there_and_back() -> None:
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"))
    random.gauss(0, 1), np.random.randn()  # each stores the second of a pair
    states = json.loads(json.dumps(random_states(accelerator)))

    def draws() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(1).item()]

    first = draws()
    draws()
    set_random_states(states)
    assert draws() == first


def test_random_states_of_a_cpu_seed_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    for rank in (7, 8):
        torch.manual_seed(rank)
        states = random_states(SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
        torch.manual_seed(0)
        set_random_states(json.loads(json.dumps(states)))
    assert seeds == [7, 8]


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    """Neither one that this rank saves, nor one that another node sends."""
    (tmp_path / "weights.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write(Draft("weights.safetensors", {}, {}), tmp_path)
    receiver: Any = SimpleNamespace(process_index=1)
    message, path = r"weights.safetensors cannot be sent .*File exists", tmp_path / "weights.safetensors"
    refusal(machines._send, receiver, path, 0, reader=0, writers=[1], match=message)
    assert not (tmp_path / "elsewhere").exists()
