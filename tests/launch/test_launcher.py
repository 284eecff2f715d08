"""What our launcher passes to its processes, whatever launcher or shell has set before."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs import CONFIGS
from toolkit.launch import launcher
from toolkit.launch.environment import MARKER
from toolkit.launch.options import plan_launch, split_arguments

# what `accelerate launch` without a config file sets where the user's default one is such
OUTER = {
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero2.json"},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "ddp": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}  # fmt: skip


@pytest.mark.parametrize("name", OUTER)
def test_processes_get_what_the_config_file_asks_for(
    name: str, no_launcher: None, monkeypatch: Any
) -> None:
    """In each attempt, and one start time: without --output_dir the attempts share a folder."""
    for variable, value in OUTER[name].items():
        monkeypatch.setenv(variable, value)
    environments: list[dict[str, str]] = []
    seconds = itertools.count()

    def start(words: list[str], env: dict[str, str], **_: Any) -> Any:
        environments.append(env)

    def run(self: launcher.Launcher) -> int:
        self.machines, self.store = [], SimpleNamespace(host="127.0.0.1", port=1)  # type: ignore
        for attempt in range(2):
            self._start(launcher.accelerate_environment(self.request), attempt)
        return 0

    monkeypatch.setattr(launcher, "Popen", start)
    monkeypatch.setattr(launcher.time, "strftime", lambda _: str(next(seconds)))
    monkeypatch.setattr(launcher.Launcher, "run", run)
    options, _ = split_arguments(["--config_file", str(CONFIGS / f"{name}.yaml")])
    assert launcher.launch(plan_launch(options, [str(Path("recipes/cls.py"))], {})) == 0
    assert len(environments) == 4
    for env in environments:
        assert (env.get("ACCELERATE_USE_DEEPSPEED") == "true") == (name == "zero2")
        assert (env.get("ACCELERATE_USE_FSDP") == "true") == (name == "fsdp2")
        assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in env
    assert len({json.loads(env[MARKER])["started"] for env in environments}) == 1
