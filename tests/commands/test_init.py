"""`toolkit init`, from a clone and from a wheel in a new environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.runs import environment, lines_of, start
from toolkit.cli import build_parser
from toolkit.commands import init

MANIFEST = (REPOSITORY / "MANIFEST.in").read_text(encoding="utf-8")
SHIPPED = sorted(re.findall(r"^include (.+)$", MANIFEST, re.MULTILINE))
FOLDERS = ("recipes", "accelerate_configs", "ds_configs")


def test_the_manifest_names_every_file_of_the_repository() -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("no git repository")
    tracked = subprocess.check_output(["git", "ls-files", *FOLDERS], cwd=REPOSITORY, text=True)
    assert tracked.split() == SHIPPED


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_init_overwrites_no_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "cls.py").write_text("print('mine')\n")
    shutil.copy(REPOSITORY / "recipes" / "title.py", tmp_path / "recipes")
    init.run(build_parser().parse_args(["init"]))
    assert (tmp_path / "recipes" / "cls.py").read_text() == "print('mine')\n"
    out = capsys.readouterr().out
    assert f"{len(SHIPPED) - 2} files copied" in out
    assert "recipes/cls.py (" in out


@pytest.fixture(scope="module")
def installed(tmp_path_factory: Any) -> Path:
    """The Python of a new environment with a wheel of this package.

    It also finds the libraries of the environment that runs the tests, but no editable install
    there: the .pth files of that folder are not executed.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files where it builds
    for name in ("toolkit", *FOLDERS):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
    (source / "recipes" / "somebodys_own.py").write_text("SECRET = 1\n")  # not in MANIFEST.in
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = folder.glob("finetune_toolkit-*.whl")
    # without pip: the one that runs the tests installs into it
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [*pip, "--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    return python


def run_in(folder: Path, program: Path, *words: str) -> str:
    path = f"{program.parent}{os.pathsep}{environment()['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": ""}
    return start([program, *words], env=variables, cwd=folder).succeeded().out


# what the script `accelerate` starts, which a wheel of ours does not bring
LAUNCH = "-m accelerate.commands.launch recipes/cls.py --config_file accelerate_configs/ddp.yaml"
SMALL = """--max_steps 2 --global_batch_size 4 --per_device_batch_size 2 --max_train_samples 16
    --max_eval_samples 8 --mixed_precision no --output_dir run"""


def test_recipes_copied_from_a_wheel_run(installed: Path, tmp_path: Path) -> None:
    output = run_in(tmp_path, installed.parent / "toolkit", "init", "my work")
    work = tmp_path / "my work"
    assert files_of(work) == SHIPPED
    assert f"{len(SHIPPED)} files copied to {work}" in output
    assert f"cd '{work}'\n  accelerate launch recipes/cls.py --config_file " in output
    where = run_in(work, installed, "-c", "import toolkit; print(toolkit.__file__)").strip()
    assert Path(where).is_relative_to(installed.parents[1])
    out = run_in(work, installed, *LAUNCH.split(), *SMALL.split())
    assert len(lines_of(work / "run" / "metrics.jsonl")) == 2, out
    config = json.loads((work / "run" / "config.json").read_text())
    assert config["world"]["num_processes"] == 2
    assert config["settings"]["dataset_name"] == "demo:rotten-tomatoes"  # nothing was named
    assert (work / "run" / "model" / "config.json").is_file()
