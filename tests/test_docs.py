"""Files, settings, commands and links that README, docs and workflows name exist; `make docs` makes
the site without a warning; pinned versions are within their ranges."""

import argparse
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import toolkit
from tests.runs import ROOT, start
from toolkit.cli import build_parser
from toolkit.config import sections_of, tasks

TOP = [ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
WORKFLOWS = [
    *sorted((ROOT / ".github").rglob("*.yml")),
    *(ROOT / ".github").glob("*.md"),
    ROOT / "Makefile",
]
# options of launchers and of `toolkit predict`, not settings of a recipe
OTHERS = {"config_file", "num_processes", "machine_rank", "main_process_ip", "main_process_port", "deepspeed_config",
          "num_gpus", "nproc_per_node", "ntasks", "nnodes", "no", "name", "help", "logdir", "rounds", "samples",
          "write", "ntasks-per-node", "no-deps", "signal", "max_restarts", "cpu", "rendezvous_timeout",
          "peer_timeout", "ddp_timeout",
          "hostfile", "no_ssh", "node_rank", "master_addr", "rdzv_backend", "rdzv_endpoint", "rdzv_conf",
          "nodes", "host", "shm-size", "ulimit", "network", "native", "pid", "export", "bind-to", "cpus-per-task",
          "private", "resolution", "cov", "skip-editable", "dist", "batch", "layers", "task", "timeout",
          "gamma", "workers", "model", "model-id", "runner", "dtype", "enable-lora", "lora-modules",
          "max-client-batch-size",
          "model_path", "model_name", "port", "rest_port", "local_dir", "backend-store-uri", "quiet"}  # fmt: skip


ENGLISH = [page for page in (ROOT / "docs").glob("*.md") if ".zh." not in page.name]
# it defines a setting and a command; decisions.md names what was dropped
WITH_UNKNOWN_NAMES = ("your-own-feature", "decisions")
# with texts of its language
WITH_OTHER_PROGRAMS = ("first-labels",)


@pytest.mark.parametrize("page", [*PAGES, *WORKFLOWS], ids=lambda page: page.name)
def test_files_and_headings_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folders = "recipes|accelerate_configs|ds_configs|docs|benchmarks|tests"
    named = re.findall(rf"\b(?:{folders})/[\w./-]+\w\.\w+", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert not missing
    for file, heading in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", text):
        target = page.parent / file if file else page
        titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert heading in anchors


@pytest.mark.parametrize("english", ENGLISH, ids=lambda page: page.name)
def test_every_page_exists_in_both_languages_with_the_same_programs(english: Path) -> None:
    """But for their comments; each links to the other."""
    chinese = english.with_suffix(".zh.md")
    programs = []
    for page, other in ((english, chinese), (chinese, english)):
        text = page.read_text(encoding="utf-8")
        assert f"]({other.name})" in "".join(text.splitlines(keepends=True)[:4])
        blocks = re.findall(r"```(?:python|diff)\n(.*?)```", text, re.S)
        programs.append([re.sub("#.*", "", block) for block in blocks])
    assert programs[0] == programs[1] or english.stem in WITH_OTHER_PROGRAMS


@pytest.mark.parametrize("page", ["data.md", "data.zh.md"])
def test_a_settings_file_of_the_docs_is_valid(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (settings,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    toolkit.settings("cls", **yaml.safe_load(settings))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_and_subcommands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = {name for task in tasks().values() for section in sections_of(task).values()
             for name in section.__dataclass_fields__}  # fmt: skip
    (commands,) = [each for each in build_parser()._actions if each.dest == "command"]
    subcommands: dict[str, argparse.ArgumentParser] = dict(commands.choices or {})
    for parser in subcommands.values():
        known |= {option.removeprefix("--") for option in parser._option_string_actions}
    options = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text))
    pattern = r"(?:^toolkit |`toolkit |bin/toolkit )([\w-]+)"
    if not page.name.startswith(WITH_UNKNOWN_NAMES):
        assert not options - known - OTHERS
        assert set(re.findall(pattern, text, re.MULTILINE)) <= set(subcommands)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("furo"), reason="the docs extra is not installed")
@pytest.mark.parametrize("tags", [[], ["-t", "zh"]])
def test_the_site_has_every_page(tags: list[str], tmp_path: Path) -> None:
    """Of a link to what does not exist Sphinx warns, and a warning is an error."""
    build = [sys.executable, *"-m sphinx -q -W --keep-going -c".split(), ROOT / "docs", *tags]
    command = [*build, "-d", tmp_path / "trees", ROOT, tmp_path / "site"]
    start(command, env={"PYTHONPATH": str(ROOT)}).succeeded()
    settings = next((tmp_path / "site").rglob("settings*.html")).read_text(encoding="utf-8")
    assert "global_batch_size" in settings
    assert "usage: toolkit predict" in settings  # made from the code
    pages = [page for page in (ROOT / "docs").glob("*.md") if (".zh." in page.name) == bool(tags)]
    assert len(list((tmp_path / "site").rglob("*.html"))) > len(pages)


@pytest.mark.parametrize("path", [*TOP, *WORKFLOWS], ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = " ".join(re.findall(r"^\.PHONY: (.*)", makefile, re.M)).split()
    text = path.read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|run: |^\s*)make ([a-z][\w-]*)", text, re.M))
    assert targets <= {*known, "it"}


def test_constraints_are_within_the_ranges_and_every_dependency_has_a_lower_bound() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", lines, re.M))
    pins = {canonicalize_name(name): pin for name, pin in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [line for line in project["dependencies"] if ">=" not in line] == []
    extras = project["optional-dependencies"].values()
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        one = Requirement(line)
        if one.name != project["name"]:
            assert one.specifier.contains(pins[canonicalize_name(one.name)]), line
