"""The command line of a run, read without starting it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.faults import refusal
from toolkit.features.doctor import job
from toolkit.launch import network

OWN = next((address for address in network.own_addresses() if not network.is_loopback(address)), "")
needs_address = pytest.mark.skipif(not OWN, reason="this machine has no address but its loopback")


def read(line: str) -> job.Job:
    return job.read(shlex.split(line), {})


def test_nothing_means_this_machine() -> None:
    asked = read("")
    assert (asked.nodes.count, asked.nodes.port, asked.settings, asked.files) == (1, 29500, {}, {})


def test_the_line_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label\n")
    asked = read(
        f"recipes/cls.py --train_file {tmp_path}/x.csv --learning_rate 3e-5 --gradient_checkpointing "
        f"--output_dir {tmp_path}/out --model_name_or_path bert-base-chinese --json --timeout 5"
    )
    assert asked.script == Path("recipes/cls.py")
    assert asked.settings == {
        "gradient_checkpointing": "true",
        "learning_rate": "3e-05",
        "model_name_or_path": "bert-base-chinese",
        "train_file": f"{tmp_path}/x.csv",
    }
    assert asked.files == {"train_file": tmp_path / "x.csv"}  # the model is the hub's
    assert (asked.own.json, asked.own.timeout, asked.output) == (True, 5.0, tmp_path / "out")
    for folder in (tmp_path, Path("missing")):  # a folder is meant: it is looked at
        line = f"recipes/cls.py --model_name_or_path {folder if folder.is_absolute() else './missing'}"
        assert read(line).files == {"model_name_or_path": folder}


def test_the_command_line_wins_over_the_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("seed: 3\nlearning_rate: 0.00003\ntrain_file: here.csv\n")
    asked = read(f"recipes/cls.py {tmp_path}/my.yaml --seed 4")
    assert asked.settings == {"learning_rate": "3e-05", "seed": "4", "train_file": "here.csv"}
    assert asked.files == {"train_file": Path("here.csv")}


def test_one_value_has_one_spelling_and_values_that_differ_stay_different() -> None:
    for one, other in (("3e-5", "0.00003"), ("true", "True"), ("no", "false"), ("32", "32.0")):
        assert job.one_spelling(one) == job.one_spelling(other)
    assert len({job.one_spelling(value) for value in ("1", "2", "a", "A", "true", "1e-5")}) == 6


@pytest.mark.parametrize("name", ["absent.py", "absent.yaml"])
def test_files_of_the_line_that_are_missing(name: str) -> None:
    refusal(read, name, match=f"there is no {name}")


def test_settings_of_a_recipe_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Focal:\n    gamma: float = 2.0\n")
    assert read(f"{tmp_path}/mine.py --gamma 2").settings == {"gamma": "2"}
    refusal(read, f"{tmp_path}/mine.py --gama 2", match=r"neither an option .* nor a setting of a recipe: --gama")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stray", "neither a RECIPE.py"),
        ("--timeout 0", "--timeout 0"),
        ("--timeout soon", "see toolkit doctor --help"),
        ("--peers 10.0.0.1", "names 10.0.0.1 alone"),
        ("--peers 192.0.2.77,192.0.2.78", "none of 192.0.2.77, 192.0.2.78 is an address of this machine"),
        ("--peers 127.0.0.1,192.0.2.77", "127.0.0.1 means each machine itself"),
        ("--config_file absent.yaml", "there is no config file absent.yaml"),
        ("--main_process_port 99999", "99999 is no TCP port"),
        ("--config_file", "--config_file.*expected one argument"),
    ],
)
def test_lines_that_cannot_be_meant(line: str, words: str) -> None:
    refusal(read, line, match=words)


@needs_address
def test_machines_from_peers_and_from_a_config_file() -> None:
    asked = read(f"--peers {OWN},192.0.2.77 --main_process_port 4000")
    assert (asked.nodes.rank, asked.nodes.addresses, asked.nodes.port) == (0, (OWN, "192.0.2.77"), 4000)
    line = f"recipes/cls.py --config_file accelerate_configs/2node.yaml --main_process_ip {OWN} --num_processes 4"
    asked = read(line)
    assert (asked.nodes.count, asked.nodes.rank, asked.nodes.addresses) == (2, 0, (OWN,))
    assert asked.processes == 4
    assert "num_processes" in asked.settings
    assert "config_file.machine_rank" not in asked.settings


def test_a_config_file_of_one_machine_means_one_machine() -> None:
    asked = read("recipes/cls.py --config_file accelerate_configs/zero2.yaml")
    assert asked.nodes.count == 1
    assert asked.files == {"deepspeed_config": Path("ds_configs/zero2.json")}


def test_configs_that_differ_in_content_are_told_apart(tmp_path: Path) -> None:
    base = "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: 'no'\n"
    names = {"same": base, "address": base + "main_process_ip: 10.0.0.9\n", "other": base + "use_cpu: true\n"}
    found = {}
    for name, text in names.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        found[name] = read(f"--config_file {tmp_path}/{name}.yaml").settings
    assert found["same"] == found["address"] != found["other"]


@pytest.mark.parametrize("words", ["--token secret", "--token=secret"])
def test_a_token_in_the_list_of_processes_is_refused(words: str) -> None:
    assert "secret" not in refusal(read, words, says=["--token", "TOOLKIT_TOKEN"]).replace("the secret", "")


@needs_address
def test_the_lines_to_type() -> None:
    asked = read(f"recipes/cls.py --seed 3 --peers {OWN},192.0.2.77 --machine_rank 0 --timeout 5")
    assert job.line_elsewhere(asked, 1) == (
        f"toolkit doctor recipes/cls.py --seed 3 --peers {OWN},192.0.2.77 --machine_rank 1 --timeout 5"
    )
    assert job.line_to_start(asked) == (
        f"accelerate launch recipes/cls.py --seed 3 --machines {OWN},192.0.2.77 --machine_rank 0 "
        "--config_file accelerate_configs/2node.yaml"
    )
    assert job.line_to_start(read("--seed 3")) == ""
    line = "recipes/cls.py --train_file 'it;s here.csv'"
    assert job.line_to_start(read(f"{line} --json")) == f"accelerate launch {line}"
