"""Promise: the files of docs/cluster start the right ranks, and a job is requeued when it should be."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

from tests.launch.test_machines import pretend_network
from tests.runs import ROOT
from toolkit.cli import build_parser
from toolkit.launch.options import plan_launch, split_arguments

FOLDER = ROOT / "docs" / "cluster"
BY_ACCELERATE, BY_SRUN = "slurm-accelerate.sbatch", "slurm-srun.sbatch"
# In place of srun and scontrol: logs its arguments and ends as `what` says.
STUB = """#!/bin/bash
echo "$(basename "$0") $*" >> {folder}/log
[ "$1" != show ] || printf 'gpu03\\ngpu04\\n'
trap 'exit 138' USR1
touch {folder}/here
case {what} in
    waits) for _ in $(seq 200); do sleep 0.1; done;;
    stops) exit 143;;
    fails) exit 3;;
esac
"""


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_network(monkeypatch, ["10.0.0.9"])


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_kubernetes_has_every_field() -> None:
    """Its models leave out unknown ones."""
    job = yaml.safe_load(text_of("trainjob.yaml"))
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    spec = yaml.safe_load(text_of("pytorchjob.yaml"))["spec"]
    for replica in spec["pytorchReplicaSpecs"].values():
        template = replica["template"]
        assert models.IoK8sApiCoreV1PodTemplateSpec.from_dict(template).to_dict() == template


def options_of(name: str) -> dict[str, str]:
    """As sbatch reads them: it stops at the first command."""
    head = text_of(name).partition("set -euo")[0]
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, re.MULTILINE))
    assert text_of(name).count("#SBATCH") == len(options)
    return options


def test_each_slurm_file_starts_the_right_tasks() -> None:
    by_accelerate, by_srun = map(options_of, (BY_ACCELERATE, BY_SRUN))
    assert by_accelerate["nodes"] == by_srun["nodes"] == "2"
    assert by_accelerate["ntasks-per-node"] == "1"
    assert by_srun["ntasks-per-node"] == by_srun["gpus-per-node"]


def test_shards_match_the_tasks(tmp_path: Path) -> None:
    assert options_of("slurm-predict.sbatch")["array"] == "1-64"
    job = yaml.safe_load(text_of("predict-job.yaml"))["spec"]
    (pod,) = job["template"]["spec"]["containers"]
    env = {variable["name"]: variable["value"] for variable in pod["env"]}
    assert (job["completionMode"], str(job["completions"])) == ("Indexed", env["SHARDS"])
    write_program(tmp_path / "toolkit", '#!/bin/bash\necho "$@"\n')
    batch = text_of("slurm-predict.sbatch").replace("source .venv", "true .venv")
    runs = [
        (["bash", "-c", batch], {"SLURM_ARRAY_TASK_ID": "64"}),
        ([*pod["command"], *pod["args"]], env | {"JOB_COMPLETION_INDEX": "63"}),
    ]
    for command, variables in runs:
        words = subprocess.check_output(
            command, env=path_with(tmp_path) | variables, text=True
        ).split()
        assert words[words.index("--shard") + 1] == "64/64"
        build_parser().parse_args(words)


def write_program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def path_with(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def start_batch(
    name: str, what: str, folder: Path, restarts: int = 0, **variables: str
) -> subprocess.Popen[str]:
    for command, end in (("srun", what), ("scontrol", "nothing")):
        write_program(folder / command, STUB.format(folder=folder, what=end))
    text = text_of(name).replace("source .venv/bin/activate\n", "")
    (folder / name).write_text(text.replace("runs/reviews", str(folder / "run")), encoding="utf-8")
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_RESTART_COUNT": str(restarts)}
    env = {**os.environ, **job, **variables, **path_with(folder)}
    command = ["bash", folder / name]
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("name", "what", "restarts", "code", "requeued"),
    [
        (BY_ACCELERATE, "finishes", 0, 0, False),
        (BY_SRUN, "fails", 0, 3, False),
        (BY_ACCELERATE, "is warned", 0, 0, True),
        (BY_SRUN, "is warned", 0, 0, True),
        (BY_SRUN, "is warned", 20, 1, False),  # for the last time
        (BY_ACCELERATE, "stops", 0, 0, True),  # without a warning
    ],
)
def test_when_a_job_is_requeued(
    name: str, what: str, restarts: int, code: int, requeued: bool, tmp_path: Path
) -> None:
    process = start_batch(name, what.replace("is warned", "waits"), tmp_path, restarts)
    if what == "is warned":
        wait_for_trap(process.pid, tmp_path / "here")
        process.send_signal(signal.SIGUSR1)
    error = process.communicate(timeout=30)[1]
    called = (tmp_path / "log").read_text(encoding="utf-8")
    assert (process.returncode, "scontrol requeue 4711" in called) == (code, requeued), error


def wait_for_trap(pid: int, here: Path) -> None:
    """Until srun runs, and the shell catches SIGUSR1."""
    deadline, has_trap = time.monotonic() + 30, False
    while not (here.exists() and has_trap):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        has_trap = bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def started_by(name: str, folder: Path, **variables: str) -> tuple[list[str], str]:
    """The arguments of `python` in the batch file's srun, and the log."""
    start_batch(name, "finishes", folder, **variables).communicate(timeout=30)
    log = (folder / "log").read_text(encoding="utf-8")
    return re.findall(" python (.*)", log)[0].split(), log


def test_each_node_of_a_slurm_job_starts_its_part(tmp_path: Path) -> None:
    (script, *words), _ = started_by(BY_ACCELERATE, tmp_path)
    options, rest = split_arguments(words)
    assert "--checkpoint_every" in rest
    for rank in (0, 1):
        machines = plan_launch(options, [script, *rest], {"SLURM_NODEID": str(rank)}).machines
        assert (machines.rank, machines.count, machines.first) == (rank, 2, "gpu03")


def test_srun_is_the_launcher_of_each_task(tmp_path: Path) -> None:
    """Ranks from its variables: tests/launch/test_environment.py. With DOCTOR each node tests itself before."""
    words, log = started_by(BY_SRUN, tmp_path, DOCTOR="yes")
    assert split_arguments(words)[0].config_file is None
    assert "export MASTER_ADDR=$(scontrol show hostnames" in text_of(BY_SRUN)
    command = "toolkit doctor --num_machines 2 --main_process_ip gpu03\n"
    assert f"--ntasks=2 --ntasks-per-node=1 {command}" in log


def pod_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(container, pod) of a job."""
    spec = yaml.safe_load(text_of(name))["spec"]
    if name == "pytorchjob.yaml":
        replicas = spec["pytorchReplicaSpecs"]
        master, worker = (replicas[kind]["template"]["spec"] for kind in ("Master", "Worker"))
        assert master == worker
        return {**master["containers"][0], "processes": int(spec["nprocPerNode"])}, master
    trainer = spec["trainer"]
    template = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]
    pod = template["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = {**trainer, **pod["containers"][0], "resources": trainer["resourcesPerNode"]}
    return {**container, "processes": trainer["numProcPerNode"]}, pod


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "trainjob.yaml"])
def test_pods_share_a_volume_and_use_each_gpu(name: str, tmp_path: Path) -> None:
    container, pod = pod_of(name)
    claim = yaml.safe_load(text_of("volume.yaml"))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    volumes: Mapping[str, Any] = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert {"/shared", "/dev/shm"} == {mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == container["processes"]
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"}
    env |= {"PET_MASTER_ADDR": "reviews-0"}
    env |= {entry["name"]: entry["value"] for entry in container["env"]}
    arguments = [word.replace("/shared", str(tmp_path)) for word in container["args"]]
    starts_rank_one_of_sixteen(["bash", FOLDER / "pod.sh", *arguments], env, tmp_path)


def test_a_skypilot_task_starts_a_process_for_each_gpu(tmp_path: Path) -> None:
    """With the variables of SkyPilot's manual (Distributed Jobs on Many Nodes)."""
    task = yaml.safe_load(text_of("skypilot.yaml"))
    assert all(line.startswith("/shared") for line in task["volumes"])
    env = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "reviews-0\nreviews-1", **task["envs"]}
    env["SKYPILOT_NUM_NODES"] = str(task["num_nodes"])
    env["SKYPILOT_NUM_GPUS_PER_NODE"] = task["resources"]["accelerators"].partition(":")[2]
    script = task["run"].replace("source .venv", "true .venv").replace("/shared", str(tmp_path))
    starts_rank_one_of_sixteen(["bash", "-ec", script], env, tmp_path)


def starts_rank_one_of_sixteen(
    command: Sequence[str | Path], env: Mapping[str, str], folder: Path
) -> None:
    log = folder / "arguments"
    write_program(folder / "python", f'#!/bin/bash\nprintf "%s\\n" "$@" > {log}\n')
    variables = {**os.environ, **env, **path_with(folder)}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, timeout=60)
    script, *words = log.read_text(encoding="utf-8").splitlines()
    options, rest = split_arguments(words)
    request = plan_launch(options, [script, *rest], {})
    assert (request.machines.rank, request.machines.first) == (1, "reviews-0")
    assert request.processes == 16
