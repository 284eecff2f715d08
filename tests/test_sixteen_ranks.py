"""Two hosts of eight ranks each: the losses of one process, exactly one evaluation, and the bytes a step sends."""

import json
import shutil
import statistics
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.hosts import ADDRESSES, TwoHosts
from tests.runs import assert_same_run, lines_of

pytestmark = [
    pytest.mark.namespaces, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(1200),
]  # fmt: skip

RANKS = 16
# Sixteen starts of torch and DeepSpeed on two cores.
SECONDS = 900
# Times the bytes of the trained weights, from one rank: (what it asks of its collectives, what a ring needs for the
# strategy). DeepSpeed's ZeRO-2 reduces by all-reduce and gathers the weights as well; its ZeRO-3 keeps whole weights
# from forward to backward in a model this small (stage3_max_reuse_distance).
BYTES = {
    "2node": (2.0, 2.0),
    "2node_zero2": (3.0, 2.0),
    "2node_zero3": (2.0, 3.0),
    "2node_fsdp2": (3.0, 3.0),
}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny BERT, eight times as wide: beside its gradients, what else is sent in a step is little."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("wide") / "wide-bert"
    shutil.copytree(tiny_model, folder)
    torch.manual_seed(0)
    BertModel(
        BertConfig.from_pretrained(folder, hidden_size=264, intermediate_size=568)
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def settings(tiny_job: list[str], wide_model: Path) -> list[str]:
    return [
        *tiny_job,
        "--model_name_or_path",
        str(wide_model),
        *"--max_steps 6 --global_batch_size 37".split(),
    ]


@pytest.mark.parametrize("name", BYTES)
def test_two_hosts_of_eight(
    name: str, hosts: TwoHosts, settings: list[str], reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "tests/ranks_worker.py", *settings, "--output_dir", str(run), "--config_file",
               f"accelerate_configs/{name}.yaml", "--main_process_ip", ADDRESSES["a"],
               "--rendezvous_timeout", "600", "--num_processes", str(RANKS)]  # fmt: skip
    for finished in hosts.run_both(dict.fromkeys(ADDRESSES, command), SECONDS).values():
        finished.succeeded()
    assert json.loads((run / "config.json").read_text())["world"]["num_processes"] == RANKS
    assert_same_run(run, reference)
    evaluated = len(lines_of(run / "predictions.jsonl"))
    assert evaluated > RANKS
    assert evaluated % RANKS  # the last batches are not full

    with safe_open(run / "model" / "model.safetensors", "np") as weights:
        size = 4 * sum(weights.get_tensor(key).size for key in weights.keys())  # noqa: SIM118
    share = size * (RANKS - 1) / RANKS
    steps = lines_of(run / "sent-hostA.jsonl")
    asked = statistics.median(sum(line["asked"].values()) for line in steps)
    expected, theory = BYTES[name]
    # an odd model's sizes are padded
    assert asked == pytest.approx(expected * share, rel=0.15), steps[-1]
    if name == "2node":  # gloo's all-reduce is a ring; its other collectives send more
        assert asked == pytest.approx(theory * share, rel=0.02)
        assert steps[-1]["sent"] - steps[0]["sent"] == pytest.approx(
            (len(steps) - 1) * RANKS / 2 * asked, rel=0.15
        )
