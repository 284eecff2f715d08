"""`--push_to_hub` with a fake of the hub's API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults import refusal
from tests.runs import Finished, lines_of, recipe
from toolkit.config import TaskSettings, build

TOKEN = "hf_notARealTokenOfAnybody"


def push(job: list[str], folder: Path, *more: str, refused: str = "", token: str = TOKEN) -> Finished:
    """A run of one step in `folder`, with its requests in `requests.jsonl` beside it."""
    env = {"HUB": str(folder.with_name("requests.jsonl")), "REFUSED": refused, "HF_TOKEN": token}
    words = [*job, "--max_steps", "1", "--global_batch_size", "8", "--push_to_hub", "true", "--output_dir", folder]
    return recipe(*words, *more, script="tests/features/hub/push_worker.py", env=env, pages=True)


@pytest.mark.multiprocess
def test_one_of_two_processes_uploads_the_model(tiny_job: list[str], tmp_path: Path) -> None:
    """And the token is in no output and in no file."""
    folder = tmp_path / "reviews"
    more = ["--hub_private_repo", "true", "--config_file", "accelerate_configs/ddp.yaml"]
    finished = push(tiny_job, folder, *more).succeeded()
    assert "https://hub/me/reviews/commit" in finished.out
    *created, uploaded = lines_of(tmp_path / "requests.jsonl")
    assert (
        created == [{"name": "create_repo", "repo_id": "reviews", "private": True}] * 2
    )  # at the start and at the end
    files = uploaded.pop("files")
    assert uploaded == {"name": "upload_folder", "repo_id": "me/reviews", "folder": str(folder / "model")}
    assert {"README.md", "model.safetensors", "config.json"} <= set(files)
    assert TOKEN not in finished.out + finished.err
    assert not [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_a_refused_upload_does_not_fail_the_run(tiny_job: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    finished = push(tiny_job, folder, "--hub_model_id", "me/reviews", refused="upload_folder").succeeded()
    (line,) = [line for line in finished.out.splitlines() if "not uploaded" in line]
    assert line.endswith(f"hf upload me/reviews {folder}/model")
    assert "403" in line
    assert (folder / "model" / "README.md").is_file()
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize(
    ("refused", "token", "setting"), [("", "", "HF_TOKEN"), ("create_repo", TOKEN, "--hub_model_id")]
)
def test_a_missing_token_or_right_is_an_error_at_the_start(
    refused: str, token: str, setting: str, tiny_job: list[str], tmp_path: Path
) -> None:
    finished = push(tiny_job, tmp_path / "run", refused=refused, token=token)
    finished.says_in_one_line("--push_to_hub", setting)
    assert TOKEN not in finished.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("values", "named"), [
    ({"push_to_hub": True}, "--hub_model_id"), ({"hub_model_id": "me/x"}, "--push_to_hub"),
    ({"hub_strategy": "end"}, "--push_to_hub"), ({"hub_token": "x"}, "HF_TOKEN"),
])  # fmt: skip
def test_settings_that_contradict_each_other(values: dict[str, Any], named: str) -> None:
    refusal(build, TaskSettings, {"train_file": "x.csv", "model_name_or_path": "x", **values}, match=named)
