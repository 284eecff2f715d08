"""The command line of a run, parsed without starting it."""

import shlex
from pathlib import Path

import pytest

from tests.faults import refusal
from toolkit.features.doctor import job
from toolkit.launch import network

OWN = next((address for address in network.local_addresses() if not network.is_loopback(address)), "")
needs_address = pytest.mark.skipif(not OWN, reason="this machine has no address but its loopback")


def read(line: str) -> job.Job:
    return job.parse(shlex.split(line), {})


def test_the_command_line_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label\n")
    line = read(
        f"recipes/cls.py --train_file {tmp_path}/x.csv --learning_rate 3e-5 --gradient_checkpointing "
        f"--output_dir {tmp_path}/out --model_name_or_path bert-base-chinese --json --timeout 5"
    )
    assert line.script == Path("recipes/cls.py")
    assert line.files == {"train_file": tmp_path / "x.csv"}  # the model is the hub's
    options = line.options
    assert (options.json, options.timeout, options.output_dir) == (True, 5.0, f"{tmp_path}/out")
    for folder in (str(tmp_path), "./missing"):  # a local path is checked
        files = read(f"recipes/cls.py --model_name_or_path {folder}").files
        assert files == {"model_name_or_path": Path(folder)}


def test_the_command_line_wins_over_the_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("seed: 3\ntest_file: there.csv\ntrain_file: here.csv\n")
    files = read(f"recipes/cls.py {tmp_path}/my.yaml --seed 4 --test_file mine.csv").files
    assert files == {"train_file": Path("here.csv"), "test_file": Path("mine.csv")}


def test_settings_of_a_users_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Focal:\n    gamma: float = 2.0\n")
    assert read(f"{tmp_path}/mine.py --gamma 2").script == tmp_path / "mine.py"
    refusal(read, f"{tmp_path}/mine.py --gama 2", match=r"neither an option .* nor a setting of a recipe: --gama")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("absent.py", "there is no absent.py"),
        ("absent.yaml", "there is no absent.yaml"),
        ("--timeout soon", "see toolkit doctor --help"),
        ("--peers 10.0.0.1", "--machines would have no effect"),
        ("--peers 192.0.2.77,192.0.2.78", "none of 192.0.2.77, 192.0.2.78 is an address of this machine"),
        ("--config_file absent.yaml", "there is no config file absent.yaml"),
        ("--config_file", "--config_file.*expected one argument"),
    ],
)
def test_wrong_command_lines(line: str, words: str) -> None:
    refusal(read, line, match=words)


@needs_address
def test_machines_from_peers_and_from_a_config_file() -> None:
    line = read(f"--peers {OWN},192.0.2.77 --main_process_port 4000")
    assert (line.nodes.rank, line.nodes.addresses, line.nodes.port) == (0, (OWN, "192.0.2.77"), 4000)
    line = read(f"recipes/cls.py --config_file accelerate_configs/2node.yaml --main_process_ip {OWN} --num_processes 4")
    assert (line.nodes.count, line.nodes.rank, line.nodes.addresses) == (2, 0, (OWN,))
    line = read(f"recipes/cls.py --seed 3 --peers {OWN},192.0.2.77 --machine_rank 0 --timeout 5")
    elsewhere = f"toolkit doctor recipes/cls.py --seed 3 --peers {OWN},192.0.2.77 --machine_rank 1 --timeout 5"
    assert line.command_for(1) == elsewhere


def test_one_machine() -> None:
    line = read("")
    assert (line.nodes.count, line.script, line.files) == (1, None, {})
    line = read("recipes/cls.py --config_file accelerate_configs/zero2.yaml")
    assert (line.nodes.count, line.files) == (1, {"deepspeed_config": Path("ds_configs/zero2.json")})
