"""Checkpoints that earlier versions wrote (tests/checkpoint/written_by) are read by this one."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.checkpoint.handmade import assert_same, read_folder
from tests.checkpoint.write_fixture import LAST, STEP, job
from tests.runs import losses_of, start, train
from toolkit.checkpoint.folder import find_fault, read_manifest

FORMATS = {"0.1.0": 1}
"""Version -> the `format` of its manifests. A new format gets a reader for each of these."""


@pytest.fixture(params=sorted((Path(__file__).parent / "written_by").iterdir()), ids=lambda folder: folder.name)
def written(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_its_format_is_that_of_its_version(written: Path) -> None:
    manifest = read_manifest(written / "checkpoint")
    assert (manifest["format"], manifest["step"]) == (FORMATS[written.name], STEP)
    assert manifest["versions"]["toolkit"] == written.name
    assert not find_fault(written / "checkpoint")
    assert sum(file.stat().st_size for file in written.rglob("*")) < 200_000


def test_a_run_resumes_from_it(written: Path, tmp_path: Path) -> None:
    out = ["--max_steps", LAST, "--resume", written / "checkpoint", "--output_dir", tmp_path / "run"]
    train(*job(written), *out)
    expected = json.loads((written / "losses.json").read_text(encoding="utf-8"))
    assert len(expected) == LAST
    assert losses_of(tmp_path / "run") == pytest.approx(expected[STEP:], rel=1e-5)


def test_it_converts(written: Path, tmp_path: Path) -> None:
    start(["toolkit", "convert", written / "checkpoint", tmp_path / "out"]).succeeded()
    assert_same(read_folder(tmp_path / "out"), load_file(written / "checkpoint" / "weights.safetensors"))
