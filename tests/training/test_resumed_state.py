"""What a resumed run begins with: schedule, loss scale, random generators; which checkpoint `--resume` means, and which
it refuses; a run that is moved aside. (Promises 3 and 5.) A checkpoint of another job: tests/test_resume.py."""

import json
import random
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch.optim import lr_scheduler

from tests.checkpoint.test_folder import flip, save
from tests.faults import refusal
from toolkit.checkpoint import folder as folders
from toolkit.config import SchedulerName, TrainingSettings
from toolkit.pretrained import model_digest
from toolkit.training import extra_state
from toolkit.training.optimizer import make_scheduler, set_schedule
from toolkit.training.precision import scaler_state, set_scaler
from toolkit.training.resume import choose_origin
from toolkit.training.run_folder import create_run_folder

TOTAL = 17


def make(name: str) -> tuple[Any, Any]:
    """An optimizer, and the schedule of this name or a recipe's own."""
    optimizer: Any = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    optimizer.step_was_skipped = False  # as of a prepared one
    if name == "own":
        own = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=TOTAL + 1)
        return optimizer, make_scheduler(optimizer, TrainingSettings(), TOTAL, own)
    warmup: dict[str, Any] = {} if name == "constant" else {"warmup_steps": 4}
    settings = TrainingSettings(learning_rate=1e-3, lr_scheduler_type=name, **warmup)
    return optimizer, make_scheduler(optimizer, settings, TOTAL)


@pytest.mark.parametrize("name", [*get_args(SchedulerName), "own"])
def test_setting_a_schedule_is_stepping_it(name: str) -> None:
    # accelerate's schedulers do not step within an accumulation, which another test may have left open
    GradientState()._set_sync_gradients(True)
    optimizer, stepped = make(name)
    for steps in range(TOTAL):
        _, fresh = make(name)
        set_schedule(fresh, steps)
        assert fresh.get_last_lr() == stepped.get_last_lr()
        assert fresh.scheduler.last_epoch == stepped.scheduler.last_epoch == steps
        optimizer.step()
        stepped.step()


def there_and_back(source: tuple[Any, Any], target: tuple[Any, Any]) -> None:
    set_scaler(*target, json.loads(json.dumps(scaler_state(*source))))


def torchs() -> tuple[Any, Any]:
    """(an accelerator, its optimizer) with torch's scaler."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    return SimpleNamespace(scaler=scaler), SimpleNamespace()


def deepspeeds() -> tuple[Any, Any]:
    scaler = DynamicLossScaler(2**16, 3, 1, 2, consecutive_hysteresis=False)
    zero = SimpleNamespace(loss_scaler=scaler)
    return SimpleNamespace(scaler=None), SimpleNamespace(optimizer=zero)


def test_a_loss_scale_resumes_and_crosses_strategies(monkeypatch: Any) -> None:
    """With the steps since its last overflow."""
    # rank 0 logs
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
    (ours, theirs), (new_ours, new_theirs) = ((torchs(), deepspeeds()) for _ in range(2))
    ours[0].scaler.update(512.0)
    ours[0].scaler._growth_tracker.fill_(2)
    there_and_back(ours, new_ours)
    assert new_ours[0].scaler.state_dict() == ours[0].scaler.state_dict()
    scaler, new_scaler = (each[1].optimizer.loss_scaler for each in (theirs, new_theirs))
    for step in range(5):
        scaler.update_scale(step == 2)
    there_and_back(theirs, new_theirs)
    for each in (scaler, new_scaler):
        each.update_scale(False)
    assert new_scaler.cur_scale == scaler.cur_scale == 2**16
    there_and_back(ours, theirs)
    assert scaler.cur_scale == 512.0
    there_and_back(new_theirs, ours)
    assert ours[0].scaler.get_scale() == 2**16
    assert ours[0].scaler.get_growth_interval() == 3  # unchanged


def test_registered_objects_that_do_not_fit() -> None:
    """There and back: tests/test_your_own_recipe.py."""

    def accelerator(*values: Any) -> Any:
        objects = [SimpleNamespace(state_dict=lambda value=value: value) for value in values]
        return SimpleNamespace(_custom_objects=objects)

    content = extra_state.registered_content(accelerator({"a": 3}, {"b": torch.ones(2)}))
    says = ["has 2 states", "register_for_checkpointing", "1 objects"]
    refusal(extra_state.load_registered, accelerator({}), content, says=says)
    message = r"register_for_checkpointing\(SimpleNamespace\)"
    refusal(extra_state.registered_content, accelerator(SimpleNamespace()), match=message)


def test_random_states_there_and_back() -> None:
    """Of Python and NumPy also the second of a pair that each stores."""
    draws = (partial(random.gauss, 0, 1), np.random.randn, random.random, partial(torch.rand, 1))
    numbers = [draw() for draw in draws]
    states = json.loads(json.dumps(extra_state.random_states(torch.device("cpu"))))
    numbers = [draw() for draw in draws]
    extra_state.set_random_states(states)
    assert [draw() for draw in draws] == numbers


FACTS: dict[str, Any] = {
    "identity": {"recipe": "cls", "model": "bert", "data": "0a1b"},
    "settings": {"train_file": "a.csv", "learning_rate": 1e-3},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4, 6):
        folder = save(tmp_path / "run" / "checkpoints", step, **FACTS)
    folders.set_links(folder.parent, best_step=4)
    return tmp_path / "run"


def step_of(origin: Path | None) -> int | None:
    return folders.step_number(origin) if origin else None


PATHS = {"": 6, "checkpoints": 6, "checkpoints/step-00000002": 2, "checkpoints/best": 4}


def test_auto_no_and_a_path(run: Path, tmp_path: Path) -> None:
    """Other settings may differ. A damaged checkpoint that is named is an error; otherwise it is skipped:
    tests/test_resume.py."""
    other = {
        "settings": {"train_file": "a.csv", "learning_rate": 1.0, "new_setting": 3},
        "identity": {**FACTS["identity"], "new": 1},
    }
    for facts in (FACTS, other):
        assert step_of(choose_origin("auto", run / "checkpoints", facts)) == 6
    assert choose_origin("auto", tmp_path / "new" / "checkpoints", FACTS) is None
    assert choose_origin("no", run / "checkpoints", FACTS) is None
    for path, step in PATHS.items():
        assert step_of(choose_origin(str(run / path), tmp_path / "new", FACTS)) == step
    folder = run / "checkpoints" / "step-00000006"
    flip(folder / folders.WEIGHTS_FILE)
    message = "^--resume .*: there is no whole checkpoint"
    refusal(choose_origin, str(folder), run / "checkpoints", FACTS, match=message)


AFRESH = {"overwrite_output_dir": True}


@pytest.mark.parametrize(
    ("options", "saved_at", "expected"),
    [(AFRESH, 1.0, None), (AFRESH, None, 8), ({"resume": "no"}, None, 8)],
)
def test_a_restart_resumes_only_what_its_job_has_saved(
    options: Any, saved_at: Any, expected: int | None, run: Path, monkeypatch: Any
) -> None:
    for step in (2, 4, 6):
        save(run / "checkpoints", step, 1.0, **FACTS)
    save(run / "checkpoints", 8, saved_at, **FACTS)
    settings = TrainingSettings(output_dir=str(run), checkpoint_every=2, **options)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert step_of(create_run_folder(settings, "cls", FACTS).origin) == expected


def test_only_a_run_that_ended_before_its_first_checkpoint_is_moved_aside(run: Path) -> None:
    settings = TrainingSettings(output_dir=str(run))
    shutil.rmtree(run / "checkpoints")
    (run / "model").mkdir()
    (run / "config.json").write_text('{"identity": {}}')
    create_run_folder(settings, "cls", FACTS)
    (aside,) = run.parent.glob("run.old-*")
    assert (aside / "model").is_dir()
    assert not (run / "model").exists()
    shutil.copy(aside / "config.json", run)
    (run / "report.html").touch()  # it has finished
    refusal(create_run_folder, settings, "cls", FACTS, match="already contains a run")


def test_the_old_run_is_moved_aside(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (link := tmp_path / "link").symlink_to(run)  # to another disk
    settings = TrainingSettings(output_dir=str(link), checkpoint_every=2, **AFRESH)
    create_run_folder(settings, "cls", FACTS)
    assert link.is_symlink()
    (aside,) = run.parent.glob("run.old-*")
    assert not (run / "checkpoints").exists()
    assert (aside / "checkpoints").exists()
    monkeypatch.chdir(run)
    (run / "model").mkdir()
    here = TrainingSettings(output_dir=".", **AFRESH)
    refusal(create_run_folder, here, "cls", FACTS, match="current folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_model_is_noticed(name: str, tmp_path: Path) -> None:
    digests = set()
    for content in ("a", "b"):
        (tmp_path / name).write_text(content)
        digests.add(model_digest(str(tmp_path)))
    assert len(digests) == 2
