"""Files, settings, subcommands and links in README and docs exist."""

import argparse
import re
from pathlib import Path

import pytest
import yaml

import toolkit
from tests.runs import ROOT
from toolkit.cli import build_parser
from toolkit.config import sections_of, tasks

TOP = [ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
# options of launchers and of `toolkit predict`, not settings of a recipe
OTHERS = {"config_file", "num_processes", "machine_rank", "main_process_ip", "main_process_port", "deepspeed_config",
          "num_gpus", "nproc_per_node", "ntasks", "nnodes", "no", "name", "help", "logdir", "rounds", "samples",
          "write", "ntasks-per-node", "no-deps", "signal", "max_restarts", "cpu", "rendezvous_timeout",
          "peer_timeout", "ddp_timeout",
          "hostfile", "no_ssh", "node_rank", "master_addr", "rdzv_backend", "rdzv_endpoint", "rdzv_conf",
          "nodes", "host", "shm-size", "ulimit", "network", "native", "pid", "export", "bind-to", "cpus-per-task",
          "private", "resolution", "cov", "skip-editable", "dist", "batch", "layers", "task", "timeout",
          "gamma", "workers", "model", "model-id", "runner",
          "model_path", "model_name", "port", "rest_port", "local_dir", "backend-store-uri", "quiet"}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_headings_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(
        re.findall(
            r"\b(?:recipes|accelerate_configs|ds_configs|docs|benchmarks|tests)/[\w./-]+\w\.\w+",
            text,
        )
    )
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert not missing
    for file, heading in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", text):
        target = page.parent / file if file else page
        titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert heading in {
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles
        }


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "recipes").iterdir())], ids=lambda page: page.name
)
def test_a_recipe_that_gets_data_gets_a_model(page: Path) -> None:
    """On the command line or in a settings file; `…` stands for the rest of a command."""
    for line in page.read_text(encoding="utf-8").replace("\\\n", "").splitlines():
        if re.search(r"recipes/\w+\.py [^`]*--(train_file|dataset_name) ", line):
            assert re.search(r"--model_name_or_path|\.py \S+\.yaml|…", line)


@pytest.mark.parametrize(
    "page", sorted({p.name.split(".")[0] for p in (ROOT / "docs").glob("*.md")})
)
def test_every_page_exists_in_both_languages_with_the_same_programs(page: str) -> None:
    """But for their comments; each links to the other."""
    english, chinese = (
        (ROOT / "docs" / f"{page}{ending}").read_text(encoding="utf-8")
        for ending in (".md", ".zh.md")
    )
    for text, other in ((english, f"{page}.zh.md"), (chinese, f"{page}.md")):
        assert f"]({other})" in "".join(text.splitlines(keepends=True)[:4])
    if page != "first-labels":  # with texts of its language
        programs, translated = (
            re.findall(r"```(?:python|diff)\n(.*?)```", text, re.S) for text in (english, chinese)
        )
        assert [re.sub("#.*", "", text) for text in programs] == [
            re.sub("#.*", "", text) for text in translated
        ]


@pytest.mark.parametrize("page", ["data.md", "data.zh.md"])
def test_a_settings_file_of_the_docs_is_valid(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (settings,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    toolkit.settings("cls", **yaml.safe_load(settings))


# it defines a setting and a command; decisions.md names what was dropped
WITH_UNKNOWN_NAMES = ("your-own-feature", "decisions")


@pytest.mark.parametrize(
    "page", [p for p in PAGES if not p.name.startswith(WITH_UNKNOWN_NAMES)], ids=lambda p: p.name
)
def test_settings_and_subcommands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = {name for task in tasks().values() for section in sections_of(task).values()
             for name in section.__dataclass_fields__}  # fmt: skip
    named = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text))
    subcommands: dict[str, argparse.ArgumentParser] = dict(
        next(action for action in build_parser()._actions if action.dest == "command").choices or {}
    )
    known |= {
        option.removeprefix("--")
        for parser in subcommands.values()
        for option in parser._option_string_actions
    }
    assert not named - known - OTHERS
    commands = set(re.findall(r"^toolkit ([\w-]+)|(?:`|bin/)toolkit ([\w-]+)", text, re.MULTILINE))
    assert {quoted or plain for plain, quoted in commands} <= set(subcommands)
