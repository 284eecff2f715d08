"""Promise: the files of docs/cluster start the right ranks, and a job is requeued when it should be."""

import os
import re
import subprocess
from collections.abc import Mapping
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
case {what} in
    warned)  # as soon as the batch script catches the signal
        until (( 0x$(sed -n 's/SigCgt:\\t//p' /proc/$PPID/status) & 0x200 )); do sleep 0.02; done
        kill -USR1 $PPID
        for _ in $(seq 200); do sleep 0.1; done;;
    stops) exit 143;;
    fails) exit 3;;
esac
"""


@pytest.fixture(autouse=True)
def _network(monkeypatch: Any) -> None:
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
        env = path_with(tmp_path) | variables
        words = subprocess.check_output(command, env=env, text=True).split()
        assert words[words.index("--shard") + 1] == "64/64"
        build_parser().parse_args(words)


def write_program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def path_with(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def run_batch(name: str, what: str, folder: Path, **variables: str) -> tuple[int, str]:
    """Its exit code, and what it called."""
    for command, end in (("srun", what), ("scontrol", "nothing")):
        write_program(folder / command, STUB.format(folder=folder, what=end))
    text = text_of(name).replace("source .venv/bin/activate\n", "")
    (folder / name).write_text(text.replace("runs/reviews", str(folder / "run")), encoding="utf-8")
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2"}
    env = {**os.environ, **job, **variables, **path_with(folder)}
    code = subprocess.call(["bash", folder / name], cwd=ROOT, env=env, timeout=60)
    return code, (folder / "log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "what", "restarts", "code", "requeued"),
    [
        (BY_ACCELERATE, "finishes", "0", 0, False),
        (BY_SRUN, "fails", "0", 3, False),
        (BY_ACCELERATE, "warned", "0", 0, True),
        (BY_SRUN, "warned", "0", 0, True),
        (BY_SRUN, "warned", "20", 1, False),  # for the last time
        (BY_ACCELERATE, "stops", "0", 0, True),  # without a warning
    ],
)
def test_when_a_job_is_requeued(
    name: str, what: str, restarts: str, code: int, requeued: bool, tmp_path: Path
) -> None:
    ended, called = run_batch(name, what, tmp_path, SLURM_RESTART_COUNT=restarts)
    assert (ended, "scontrol requeue 4711" in called) == (code, requeued)


def test_each_slurm_file_starts_its_tasks(tmp_path: Path) -> None:
    """One launcher on each node, or srun as the launcher of each task, whose ranks are those of its variables
    (tests/launch/test_environment.py). With DOCTOR each node tests itself before."""
    by_accelerate, by_srun = map(options_of, (BY_ACCELERATE, BY_SRUN))
    assert by_accelerate["nodes"] == by_srun["nodes"] == "2"
    assert by_accelerate["ntasks-per-node"] == "1"
    assert by_srun["ntasks-per-node"] == by_srun["gpus-per-node"]
    called = run_batch(BY_ACCELERATE, "finishes", tmp_path)[1]
    script, *words = re.findall(" python (.*)", called)[0].split()
    options, rest = split_arguments(words)
    assert "--checkpoint_every" in rest
    for rank in (0, 1):
        machines = plan_launch(options, [script, *rest], {"SLURM_NODEID": str(rank)}).machines
        assert (machines.rank, machines.count, machines.first) == (rank, 2, "gpu03")
    called = run_batch(BY_SRUN, "finishes", tmp_path, DOCTOR="yes")[1]
    words = re.findall(" python (.*)", called)[-1].split()
    assert split_arguments(words)[0].config_file is None
    assert "export MASTER_ADDR=$(scontrol show hostnames" in text_of(BY_SRUN)
    command = "toolkit doctor --num_machines 2 --main_process_ip gpu03\n"
    assert f"--ntasks=2 --ntasks-per-node=1 {command}" in called


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


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "trainjob.yaml", "skypilot.yaml"])
def test_each_pod_starts_a_process_for_each_gpu(name: str, tmp_path: Path) -> None:
    """On a shared volume. For SkyPilot with the variables of its manual (Distributed Jobs on Many Nodes)."""
    if name == "skypilot.yaml":
        task = yaml.safe_load(text_of(name))
        assert all(line.startswith("/shared") for line in task["volumes"])
        env = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "reviews-0\nreviews-1"}
        env |= {**task["envs"], "SKYPILOT_NUM_NODES": str(task["num_nodes"])}
        env["SKYPILOT_NUM_GPUS_PER_NODE"] = task["resources"]["accelerators"].partition(":")[2]
        command = ["bash", "-ec", task["run"].replace("source .venv", "true .venv")]
    else:
        container, pod = pod_of(name)
        claim = yaml.safe_load(text_of("volume.yaml"))
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        volumes: Mapping[str, Any] = {volume["name"]: volume for volume in pod["volumes"]}
        name_of_claim = volumes["shared"]["persistentVolumeClaim"]["claimName"]
        assert name_of_claim == claim["metadata"]["name"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"/shared", "/dev/shm"}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == container["processes"]
        env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"}
        env["PET_MASTER_ADDR"] = "reviews-0"
        env |= {entry["name"]: entry["value"] for entry in container["env"]}
        command = ["bash", str(FOLDER / "pod.sh"), *container["args"]]
    log = tmp_path / "arguments"
    write_program(tmp_path / "python", f'#!/bin/bash\nprintf "%s\\n" "$@" > {log}\n')
    command = [word.replace("/shared", str(tmp_path)) for word in command]
    env = {**os.environ, **env, **path_with(tmp_path)}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=60)
    script, *words = log.read_text(encoding="utf-8").splitlines()
    options, rest = split_arguments(words)
    request = plan_launch(options, [script, *rest], {})
    assert (request.machines.rank, request.machines.first) == (1, "reviews-0")
    assert request.processes == 16
