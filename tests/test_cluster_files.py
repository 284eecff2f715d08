"""docs/cluster: the files are what Slurm and Kubernetes read, and their own commands start one world on two hosts.

There is no cluster here. `srun` is a stand-in below that does what its manual says; the variables of pods are those
that the operators' sources set. Run as a program, this file is that `srun`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # as a program
    sys.path.insert(0, str(ROOT))

from tests.hosts import ADDRESSES, NAMES, TwoHosts, two_hosts  # noqa: E402
from tests.runs import Finished, losses_of, recipe  # noqa: E402

FOLDER = ROOT / "docs" / "cluster"
BATCH_FILES = ["slurm-accelerate.sbatch", "slurm-srun.sbatch"]
SECONDS = 240
# of the reference; a run that is stopped in the middle has far more before it, so that it is not done by then
STEPS, MANY = 150, 4000
IN_IMAGE = "/workspace/finetune-toolkit"


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def edited(text: str, changes: Mapping[str, str]) -> str:
    """A file as a user would change it: each piece is there, once."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return text


# --- Slurm's files as sbatch reads them

_NAME = r"[\w.+-]+"
_COUNT = r"[1-9]\d*"
# sbatch's manual: option -> a plausible value; None: it takes none
OPTIONS: dict[str, str | None] = {
    "nodes": _COUNT,
    "ntasks-per-node": _COUNT,
    "cpus-per-task": _COUNT,
    "gpus-per-node": rf"(?:[a-z]\w*:)?{_COUNT}",
    "mem": r"\d+[KMGT]?",
    "time": r"(?:\d+-)?\d{1,2}:\d\d:\d\d",
    "partition": rf"{_NAME}(?:,{_NAME})*",
    "signal": r"(?:[RB]{1,2}:)?(?:[A-Z]+\d?|\d+)(?:@\d{1,5})?",
    "requeue": None,
    "open-mode": r"append|truncate",
    "job-name": _NAME,
    "output": r"(?:[\w./-]|%[AaJjNnstux%])+",
}


def sbatch_options(text: str) -> dict[str, str | None]:
    """The options of a batch script, up to its first command, where sbatch stops. ValueError for what it refuses."""
    found: dict[str, str | None] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if not line.startswith("#SBATCH"):
            continue
        words = line.removeprefix("#SBATCH").split()
        option = re.fullmatch(r"--([a-z-]+)(?:=(\S+))?", words[0]) if len(words) == 1 else None
        name, value = option.groups() if option else ("", None)
        pattern = OPTIONS.get(name, "")
        fits = pattern is value is None or (pattern and value and re.fullmatch(pattern, value))
        if not fits:
            raise ValueError(f"not an option of sbatch, or not a value of it: {line}")
        if name in found:
            raise ValueError(f"said twice: {line}")
        found[name] = value
    return found


@pytest.mark.parametrize("name", [*BATCH_FILES, "pod.sh"])
def test_bash_reads_it(name: str) -> None:
    checked = subprocess.run(["bash", "-n", FOLDER / name], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "\nset -euo pipefail\n" in text_of(name)
    assert max(len(line) for line in text_of(name).splitlines()) <= 120


@pytest.mark.parametrize("name", BATCH_FILES)
def test_sbatch_reads_its_options(name: str) -> None:
    text = text_of(name)
    options = sbatch_options(text)
    assert text.count("#SBATCH") == len(options)  # none behind the first command, where sbatch would not see it
    assert {"nodes", "time", "requeue"} <= set(options)
    assert (options["nodes"], options["open-mode"]) == ("2", "append")
    assert options["ntasks-per-node"] == ("1" if "accelerate" in name else options["gpus-per-node"])
    assert options["signal"] == "B:USR1@300"  # the shell's own trap takes it
    assert "%j" in str(options["output"])


@pytest.mark.parametrize(
    "line",
    ["--ntask-per-node=1", "--nodes=two", "--time=soon", "--requeue=yes", "--signal=B:USR1@5min", "--nodes 2",
     "--nodes=2  # a comment", "--partition", "--nodes=3"],
)  # fmt: skip
def test_what_sbatch_would_refuse_is_seen(line: str) -> None:
    script = text_of("slurm-srun.sbatch")
    with pytest.raises(ValueError, match=r"sbatch|twice"):
        sbatch_options(script.replace("#SBATCH --requeue", f"#SBATCH {line}\n#SBATCH --requeue"))


def test_both_batch_files_end_alike() -> None:
    first, second = (text_of(name).partition("# --- the end")[2] for name in BATCH_FILES)
    assert first == second != ""


# --- Kubernetes' files against the schemas of its API, of Kubeflow Trainer (the package kubeflow-trainer-api) and of
# --- the Training Operator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _RunPolicy(_Strict):
    activeDeadlineSeconds: int | None = None  # noqa: N815
    backoffLimit: int | None = None  # noqa: N815
    cleanPodPolicy: Literal["Running", "All", "None"] | None = None  # noqa: N815
    managedBy: str | None = None  # noqa: N815
    schedulingPolicy: dict[str, Any] | None = None  # noqa: N815
    suspend: bool | None = None
    ttlSecondsAfterFinished: int | None = None  # noqa: N815


class _ReplicaSpec(_Strict):
    replicas: int | None = None
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"] | None = None  # noqa: N815
    template: dict[str, Any] | None = None


class _Replicas(_Strict):
    Master: _ReplicaSpec | None = None
    Worker: _ReplicaSpec | None = None


class _PyTorchJobSpec(_Strict):
    elasticPolicy: dict[str, Any] | None = None  # noqa: N815
    nprocPerNode: str | None = None  # noqa: N815
    pytorchReplicaSpecs: _Replicas  # noqa: N815
    runPolicy: _RunPolicy | None = None  # noqa: N815


class _PyTorchJob(_Strict):
    """kubeflow.org/v1, by kubeflow-training 1.9.4, which itself wants a hundred megabytes of other packages."""

    apiVersion: Literal["kubeflow.org/v1"]  # noqa: N815
    kind: Literal["PyTorchJob"]
    metadata: dict[str, Any]
    spec: _PyTorchJobSpec
    status: dict[str, Any] | None = None


def assert_is(model: Any, found: Mapping[str, Any]) -> None:
    """Whether the model of the package reads it, and drops nothing that it does not know."""
    assert model.from_dict(found).to_dict() == found


def check_kubernetes(name: str, found: Mapping[str, Any]) -> None:
    """AssertionError or ValidationError (a ValueError) where the API would refuse a document of docs/cluster."""
    from kubeflow_trainer_api import models

    assert_is(models.IoK8sApimachineryPkgApisMetaV1ObjectMeta, found["metadata"])
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found["metadata"]["name"])
    if name == "pytorchjob.yaml":
        _PyTorchJob.model_validate(found)
        for replica in found["spec"]["pytorchReplicaSpecs"].values():
            assert_is(models.IoK8sApiCoreV1PodTemplateSpec, replica["template"])
    elif name == "trainjob.yaml":
        assert_is(models.TrainerV1alpha1TrainJob, found)
        assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    else:
        assert_is(models.IoK8sApiCoreV1PersistentVolumeClaim, found)
        assert (found["apiVersion"], found["kind"]) == ("v1", "PersistentVolumeClaim")


def pod_spec_of(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The pods' spec, as far as the file says it."""
    if name == "pytorchjob.yaml":
        return dict(found["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"])
    (patch,) = found["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"  # of the runtime torch-distributed
    return dict(job["template"]["spec"]["template"]["spec"])


KUBERNETES_FILES = ["volume.yaml", "pytorchjob.yaml", "trainjob.yaml"]
JOBS = KUBERNETES_FILES[1:]


@pytest.mark.parametrize("name", KUBERNETES_FILES)
def test_the_api_reads_it(name: str) -> None:
    check_kubernetes(name, yaml.safe_load(text_of(name)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pytorchjob.yaml", {"nprocPerNode:": "numProcPerNode:"}),
        ("pytorchjob.yaml", {'nprocPerNode: "8"': "nprocPerNode: 8"}),
        ("pytorchjob.yaml", {"backoffLimit: 20": "backoffLimits: 20"}),
        ("pytorchjob.yaml", {"    Worker:\n": "    Workers:\n"}),
        ("pytorchjob.yaml", {"command: [bash": "comand: [bash"}),
        ("pytorchjob.yaml", {"medium: Memory": "medum: Memory"}),
        ("pytorchjob.yaml", {"terminationGracePeriodSeconds: 300": "terminationGracePeriodSeconds: 5m"}),
        ("trainjob.yaml", {"numProcPerNode: 8": "numProcPerNode: all"}),
        ("trainjob.yaml", {"numNodes:": "nodes:"}),
        ("trainjob.yaml", {"resourcesPerNode:": "resources:"}),
        ("trainjob.yaml", {"trainingRuntimeSpec:": "trainingRuntime:"}),
        ("trainjob.yaml", {"claimName:": "claim:"}),
        ("volume.yaml", {"accessModes:": "accessMode:"}),
    ],
)
def test_what_the_api_would_refuse_is_seen(name: str, changes: Mapping[str, str]) -> None:
    with pytest.raises((AssertionError, ValidationError)):
        check_kubernetes(name, yaml.safe_load(edited(text_of(name), changes)))


@pytest.mark.parametrize("name", JOBS)
def test_pods_share_a_volume_and_have_shared_memory(name: str) -> None:
    claim = yaml.safe_load(text_of("volume.yaml"))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    found = yaml.safe_load(text_of(name))
    spec = pod_spec_of(name, found)
    (container,) = spec["containers"]
    assert container["name"] == ("pytorch" if name == "pytorchjob.yaml" else "node")
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert spec["terminationGracePeriodSeconds"] >= 300
    program = container if name == "pytorchjob.yaml" else found["spec"]["trainer"]
    limits = program.get("resources", found["spec"].get("trainer", {}).get("resourcesPerNode"))["limits"]
    processes = found["spec"].get("nprocPerNode") or found["spec"]["trainer"]["numProcPerNode"]
    assert limits["nvidia.com/gpu"] == int(processes)
    environment = {variable["name"]: variable["value"] for variable in program["env"]}
    assert environment["TOOLKIT_CACHE"].startswith("/shared/")
    assert not [name for name in environment if name.startswith("PET_")]  # Trainer refuses those
    assert program["args"][0].startswith("/shared/")
    assert program["command"] == ["bash", f"{IN_IMAGE}/docs/cluster/pod.sh"]


def test_both_kinds_of_job_say_the_same() -> None:
    first, second = (yaml.safe_load(text_of(name)) for name in JOBS)
    (container,) = pod_spec_of("pytorchjob.yaml", first)["containers"]
    trainer = second["spec"]["trainer"]
    assert [container[name] for name in ("image", "command", "args", "env")] == [
        trainer[name] for name in ("image", "command", "args", "env")
    ]
    assert container["resources"] == trainer["resourcesPerNode"]
    replicas = first["spec"]["pytorchReplicaSpecs"].values()
    assert sum(replica["replicas"] for replica in replicas) == trainer["numNodes"] == 2
    assert {replica["restartPolicy"] for replica in replicas} == {"OnFailure"}


def test_the_operators_own_package_has_these_fields() -> None:
    """Where it is installed: `pip install kubeflow-training==1.9.4`."""
    theirs = pytest.importorskip("kubeflow.training")
    kinds = {int: "int", str: "str", bool: "bool"}
    for ours, model in (
        (_PyTorchJob, theirs.KubeflowOrgV1PyTorchJob),
        (_PyTorchJobSpec, theirs.KubeflowOrgV1PyTorchJobSpec),
        (_ReplicaSpec, theirs.KubeflowOrgV1ReplicaSpec),
        (_RunPolicy, theirs.KubeflowOrgV1RunPolicy),
    ):
        assert set(ours.model_fields) == set(model.attribute_map.values())
        for name, attribute in model.attribute_map.items():
            for kind, said in kinds.items():
                wanted = ours.model_fields[attribute].annotation in (kind, kind | None)
                assert not wanted or model.openapi_types[name] == said


# --- a stand-in for Slurm, by the manuals of sbatch and srun


def tasks_per_node(options: Mapping[str, str | None]) -> int:
    return int(options["ntasks-per-node"] or 1)


def batch_environment(options: Mapping[str, str | None], restarts: int = 0) -> dict[str, str]:
    """What Slurm gives a batch script on the first machine of a job (the part that concerns a program)."""
    nodes, tasks = int(options["nodes"] or 1), tasks_per_node(options)
    names = ",".join(list(NAMES.values())[:nodes])
    return {
        "SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_JOB_NAME": str(options["job-name"]),
        "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": names, "SLURM_NODELIST": names,
        "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NTASKS": str(nodes * tasks), "SLURM_NPROCS": str(nodes * tasks),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})", "SLURM_CPUS_PER_TASK": str(options["cpus-per-task"]),
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURMD_NODENAME": names.split(",")[0],
        # the script itself is a task
        "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0",
        **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
    }  # fmt: skip


class Slurm:
    """`srun` and `scontrol` for PATH. `reach`: machine -> the beginning of a shell command for it, "" for here."""

    def __init__(self, folder: Path, reach: Mapping[str, str]) -> None:
        self.folder = folder
        self.asked = folder / "scontrol.txt"
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self._write("srun", f'exec {sys.executable} {Path(__file__).resolve()} "$@"')
        self._write("scontrol", f'echo "$*" >> {shlex.quote(str(self.asked))}')
        (folder / "reach.json").write_text(json.dumps(dict(reach)), encoding="utf-8")

    def _write(self, name: str, line: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (self.bin / name).chmod(0o755)

    def script(self, text: str) -> Path:
        """A batch script as Slurm keeps it: under another name, elsewhere."""
        path = self.folder / "slurm_script"
        path.write_text(text, encoding="utf-8")
        return path

    def environment(self, text: str, restarts: int = 0) -> dict[str, str]:
        path = os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {**batch_environment(sbatch_options(text), restarts), "PATH": path, "STANDIN": str(self.folder)}

    @property
    def requeued(self) -> list[str]:
        return self.asked.read_text(encoding="utf-8").splitlines() if self.asked.exists() else []


def srun(arguments: Sequence[str]) -> int:
    """Starts a step's tasks on the machines of the job, hands signals on to each task, and waits for all.

    To the tasks alone, not to what they have started: so does proctrack/cgroup.
    """
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    for name in ("--cpus-per-task", "--ntasks", "--ntasks-per-node"):
        parser.add_argument(name, type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(list(arguments))
    job = os.environ
    nodes = job["SLURM_JOB_NODELIST"].split(",")
    each = asked.ntasks_per_node or int(job.get("SLURM_NTASKS_PER_NODE", 1))
    count = asked.ntasks or int(job.get("SLURM_NTASKS", each * len(nodes)))
    if count != each * len(nodes):
        parser.error(f"can't honor --ntasks-per-node set to {each} with {count} tasks on {len(nodes)} nodes")
    folder = Path(job["STANDIN"])
    number = len(list(folder.glob("step-*")))
    (folder / f"step-{number}").write_text(shlex.join(arguments), encoding="utf-8")
    reach = json.loads((folder / "reach.json").read_text(encoding="utf-8"))
    step = {
        "SLURM_STEP_ID": str(number), "SLURM_STEPID": str(number), "SLURM_STEP_NODELIST": ",".join(nodes),
        "SLURM_STEP_NUM_NODES": str(len(nodes)), "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{len(nodes)})" if len(nodes) > 1 else str(each),
        "SLURM_NTASKS": str(count), "SLURM_NPROCS": str(count), "SLURM_NNODES": str(len(nodes)),
    }  # fmt: skip
    tasks = []
    for rank in range(count):
        node, local = divmod(rank, each)
        own = {
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": nodes[node],
            "SLURM_GTIDS": ",".join(str(other) for other in range(node * each, (node + 1) * each)),
        }  # fmt: skip
        line = f"exec {shlex.join(asked.command)}"
        prefix = reach[nodes[node]]
        tasks.append(subprocess.Popen(["sh", "-c", f"{prefix} {shlex.quote(line)}" if prefix else line],
                                      env={**job, **step, **own}, stdin=subprocess.DEVNULL))  # fmt: skip

    def hand_on(number: int, _: object) -> None:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                task.send_signal(number)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, hand_on)
    return max(code if code >= 0 else 128 - code for code in [task.wait() for task in tasks])


# --- when a job is put back into the queue, without training

FAKE_JOB = """
import signal, sys, time
from pathlib import Path
what, folder = sys.argv[1], Path(sys.argv[sys.argv.index("--output_dir") + 1])
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(True))
folder.mkdir(parents=True, exist_ok=True)
(folder.parent / "here").write_text("")
deadline = time.monotonic() + 20
while what == "waits" and not told and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.3)
if what == "finishes":
    (folder / "report.html").write_text("")
sys.exit(3 if what == "fails" else 0)
"""
# what the job does -> (what is there before, the job's restarts so far; exit code, put back)
ENDS: dict[str, tuple[str, bool, int, int, bool]] = {
    "it finishes": ("finishes", False, 0, 0, False),
    "it fails": ("fails", False, 0, 3, False),
    "it is warned": ("waits", False, 0, 0, True),
    "it is warned, for the last time": ("waits", False, 20, 1, False),
    "it is stopped without a warning to the shell": ("stops", False, 0, 0, True),
    "it is stopped, and an older report is there": ("stops", True, 0, 0, True),
}


@pytest.mark.parametrize("name", BATCH_FILES)
@pytest.mark.parametrize("how", ENDS)
def test_when_a_job_is_put_back(how: str, name: str, tmp_path: Path) -> None:
    what, older, restarts, code, put_back = ENDS[how]
    job, folder = tmp_path / "job.py", tmp_path / "runs" / "reviews"
    job.write_text(FAKE_JOB, encoding="utf-8")
    if older:
        folder.mkdir(parents=True)
        (folder / "report.html").write_text("")
    slurm = Slurm(tmp_path / "slurm", {"hostA": ""})
    text = edited(
        text_of(name),
        {"source .venv/bin/activate\n": "", "run=runs/reviews": f"run={folder}", "--nodes=2": "--nodes=1",
         "    recipes/cls.py\n": f"    {job} {what}\n"},
    )  # fmt: skip
    if "--ntasks-per-node=8" in text:
        text = text.replace("--ntasks-per-node=8", "--ntasks-per-node=1")
    process = subprocess.Popen(["bash", slurm.script(text)], env=slurm.environment(text, restarts), cwd=ROOT,
                               stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
    if what == "waits":
        await_file(tmp_path / "runs" / "here", process)
        process.send_signal(signal.SIGUSR1)
    error = process.communicate(timeout=30)[1]
    assert (process.returncode, slurm.requeued) == (code, ["requeue 4711"] if put_back else []), error
    assert ("put back 20 times" in error) == (restarts == 20)


def await_file(path: Path, *processes: subprocess.Popen[str], lines: int = 0) -> None:
    """Until a file is there, and has so many lines; the processes that write it must not end before."""
    deadline = time.monotonic() + SECONDS
    while not path.is_file() or len(path.read_bytes().splitlines()) < lines:
        assert time.monotonic() < deadline, f"{path} does not come"
        for process in processes:
            assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)


# --- the commands of the files, on two hosts


def on_two_hosts(test: Any) -> Any:
    return pytest.mark.namespaces(pytest.mark.multiprocess(test))


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    yield from two_hosts()


@pytest.fixture(scope="module")
def settings() -> list[str]:
    """Beside those in the files."""
    return ["--dropout", "0", "--mixed_precision", "no", "--report_to", "none", "--global_batch_size", "12",
            "--per_device_batch_size", "4", "--lr_scheduler_type", "constant"]  # fmt: skip


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory, settings: list[str], tiny_model: Path, reviews: Path
) -> list[float]:
    """The losses of one process on one machine."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    finished = recipe("--model_name_or_path", tiny_model, "--train_file", reviews, *settings, "--max_steps", str(STEPS),
                      "--eval_every", "100000", "--output_dir", folder)  # fmt: skip
    assert finished.code == 0, finished.err[-3000:]
    return losses_of(folder)


def assert_one_world(folder: Path, reference: Sequence[float], kind: str, steps: int) -> None:
    world = json.loads((folder / "config.json").read_text(encoding="utf-8"))["world"]
    assert (world["num_processes"], world["distributed_type"]) == (2, kind)
    assert losses_of(folder) == pytest.approx(reference[:steps], rel=1e-5)


class Cluster:
    """The two hosts as Slurm's machines."""

    def __init__(self, hosts: TwoHosts, folder: Path, name: str, changes: Mapping[str, str]) -> None:
        self.hosts, self.run = hosts, folder / "runs" / "reviews"
        self.slurm = Slurm(folder / "slurm", {"hostA": "", "hostB": hosts.shell_on("b")})
        self.text = edited(text_of(name), {"run=runs/reviews": f"run={self.run}", **changes})

    def start(self, restarts: int = 0, **variables: str) -> subprocess.Popen[str]:
        environment = {**self.slurm.environment(self.text, restarts), **variables}
        return self.hosts.start("a", ["bash", self.slurm.script(self.text)], env=environment)

    def finish(self, process: subprocess.Popen[str]) -> Finished:
        return self.hosts.finish(process, SECONDS)


@pytest.fixture
def start_slurm(
    hosts: TwoHosts, settings: list[str], tiny_model: Path, reviews: Path, tmp_path: Path
) -> Callable[..., Cluster]:
    """`start_slurm("slurm-srun.sbatch", steps, changes)`: the file with its lines edited for the two hosts."""

    def start(name: str, steps: int, changes: Mapping[str, str] | None = None) -> Cluster:
        more = shlex.join([*settings, "--max_steps", str(steps), "--eval_every", "100000"])
        needed = {
            "source .venv/bin/activate\n": "",
            "--train_file reviews.csv": f"--train_file {reviews}",
            "bert-base-chinese": str(tiny_model),
            "--checkpoint_every 200": f"--checkpoint_every 20 {more}",
        }
        if name == "slurm-srun.sbatch":
            needed["--ntasks-per-node=8"] = "--ntasks-per-node=1"
        return Cluster(hosts, tmp_path, name, {**needed, **(changes or {})})

    return start


def check_time_limit(cluster: Cluster, reference: Sequence[float], kind: str) -> None:
    """Warned in the middle, the job takes a checkpoint and is put back, and then goes on, to its end."""
    first = cluster.start()
    await_file(cluster.run / "metrics.jsonl", first, lines=3)
    first.send_signal(signal.SIGUSR1)  # to the shell alone: --signal=B:
    done = cluster.finish(first)
    assert done.code == 0, done.err[-3000:]
    assert "this is machine 0 (hostA) of 2: SLURM_NODEID" in done.err
    assert "stopped by SIGUSR1 after step" in done.err
    assert cluster.slurm.requeued == ["requeue 4711"]
    steps = len(losses_of(cluster.run))
    cluster.text = edited(cluster.text, {f"--max_steps {MANY}": f"--max_steps {steps + 5}"})
    again = cluster.finish(cluster.start(restarts=1))
    assert again.code == 0, again.err[-3000:]
    assert f"step {steps} of {steps + 5}" in again.err
    assert len(cluster.slurm.requeued) == 1  # not once more
    assert_one_world(cluster.run, reference, kind, steps + 5)


@on_two_hosts
def test_slurm_with_a_launcher_and_its_time_limit(start_slurm: Callable[..., Cluster], reference: list[float]) -> None:
    check_time_limit(start_slurm("slurm-accelerate.sbatch", MANY, {"/2node_zero2.yaml": "/2node.yaml"}), reference,
                     "MULTI_CPU")  # fmt: skip


@pytest.mark.slow
@on_two_hosts
def test_slurm_with_zero2_and_its_time_limit(start_slurm: Callable[..., Cluster], reference: list[float]) -> None:
    check_time_limit(start_slurm("slurm-accelerate.sbatch", MANY), reference, "DEEPSPEED")


@pytest.mark.slow
@on_two_hosts
def test_slurm_with_the_literal_command(start_slurm: Callable[..., Cluster], reference: list[float]) -> None:
    """It starts as well; why the file says `python` is shown here too."""
    cluster = start_slurm("slurm-accelerate.sbatch", 3, {'" python "${job[@]}"': '" accelerate launch "${job[@]}"'})
    done = cluster.finish(cluster.start())
    assert done.code == 0, done.err[-3000:]
    assert_one_world(cluster.run, reference, "DEEPSPEED", 3)
    assert cluster.slurm.requeued == []


@on_two_hosts
def test_slurm_without_a_launcher(start_slurm: Callable[..., Cluster], reference: list[float]) -> None:
    cluster = start_slurm("slurm-srun.sbatch", 3)
    done = cluster.finish(cluster.start())
    assert done.code == 0, done.err[-3000:]
    assert "machines: hostA (rank 0), hostB (rank 1)" in done.err
    assert_one_world(cluster.run, reference, "MULTI_CPU", 3)
    assert cluster.slurm.requeued == []


@pytest.mark.slow
@on_two_hosts
def test_slurm_without_a_launcher_zero2(start_slurm: Callable[..., Cluster], reference: list[float]) -> None:
    line = "    --checkpoint_every 20"
    cluster = start_slurm("slurm-srun.sbatch", 3)
    cluster.text = edited(cluster.text, {line: f"    --deepspeed_config ds_configs/zero2.json\n{line}"})
    done = cluster.finish(cluster.start())
    assert done.code == 0, done.err[-3000:]
    assert_one_world(cluster.run, reference, "DEEPSPEED", 3)


@pytest.mark.slow
@on_two_hosts
def test_slurm_on_one_machine(start_slurm: Callable[..., Cluster], reference: list[float]) -> None:
    cluster = start_slurm("slurm-srun.sbatch", 3, {"--nodes=2": "--nodes=1"})
    cluster.text = edited(cluster.text, {"--ntasks-per-node=1\n#": "--ntasks-per-node=2\n#"})
    done = cluster.finish(cluster.start())
    assert done.code == 0, done.err[-3000:]
    assert_one_world(cluster.run, reference, "MULTI_CPU", 3)


@pytest.mark.slow
@on_two_hosts
@pytest.mark.parametrize("name", BATCH_FILES)
def test_slurm_and_the_doctor(name: str, start_slurm: Callable[..., Cluster]) -> None:
    cluster = start_slurm(name, 3)
    done = cluster.finish(cluster.start(DOCTOR="yes"))
    assert done.code == 0, done.err[-3000:]
    assert done.out.count("the machines together") == 2
    assert "this is machine 1 of 2 (SLURM_NODEID)" in done.out
    assert (cluster.run / "report.html").is_file()


# --- pods, with the variables that the operators give them


def pytorchjob_environment(job: Mapping[str, Any], number: int) -> dict[str, str]:
    """By training-operator 1.9, pkg/controller.v1/pytorch/envvar.go and master.go: a pod's number is its RANK."""
    spec = job["spec"]
    pods = sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())
    first = f"{job['metadata']['name']}-master-0"
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "MASTER_ADDR": first, "PET_MASTER_ADDR": first,
        "WORLD_SIZE": str(pods * int(spec["nprocPerNode"])), "RANK": str(number), "PET_NODE_RANK": str(number),
        "PET_NPROC_PER_NODE": spec["nprocPerNode"], "PET_NNODES": str(pods),
    }  # fmt: skip


def trainjob_environment(job: Mapping[str, Any], number: int) -> dict[str, str]:
    """By trainer 2.2, pkg/runtime/framework/plugins/torch/torch.go and pkg/constants/constants.go; the index is
    Kubernetes' own, of an Indexed Job."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    return {
        "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(number), "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(number),
    }  # fmt: skip


def pod_names(name: str, job: str) -> dict[str, str]:
    """Host -> a pod's host name."""
    first, second = ("master-0", "worker-0") if name == "pytorchjob.yaml" else ("node-0-0", "node-0-1")
    return {"a": f"{job}-{first}", "b": f"{job}-{second}"}


class Pods:
    """The two pods of a job, each with process number 1 of its own, as a container has it."""

    def __init__(self, hosts: TwoHosts, folder: Path, name: str, changes: Mapping[str, str]) -> None:
        self.hosts, self.shared, self.name = hosts, folder / "shared", name
        self.shared.mkdir()
        text = text_of(name).replace(IN_IMAGE, str(ROOT)).replace("/shared", str(self.shared))
        self.job: dict[str, Any] = yaml.safe_load(edited(text, changes))
        self.run = self.shared / "runs" / "reviews"
        job = self.job["metadata"]["name"]
        self.names = pod_names(name, job)
        self.etc_hosts = folder / "hosts"
        known = [f"{ADDRESSES[host]} {name} {name}.{job}" for host, name in self.names.items()]
        self.etc_hosts.write_text("\n".join(["127.0.0.1 localhost", *known, ""]), encoding="utf-8")

    def start(self, host: str, command: Sequence[str] | None = None, more: Sequence[str] = ()) -> subprocess.Popen[str]:
        number = "ab".index(host)
        if self.name == "pytorchjob.yaml":
            (program,) = pod_spec_of(self.name, self.job)["containers"]
            told = pytorchjob_environment(self.job, number)
        else:
            program = self.job["spec"]["trainer"]
            told = trainjob_environment(self.job, number)
        given = {variable["name"]: variable["value"] for variable in program["env"]}
        words = command or [*program["command"], *program["args"], *more]
        named = f'echo {self.names[host]} > /proc/sys/kernel/hostname; exec "$@"'
        container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", named, "sh", *words]
        return self.hosts.start(host, container, env={**given, **told},
                                binds={"/etc/hosts": self.etc_hosts})  # fmt: skip

    def start_both(
        self, command: Sequence[str] | None = None, steps: int | None = None
    ) -> dict[str, subprocess.Popen[str]]:
        more = ["--max_steps", str(steps)] if steps else []  # said twice, the last counts
        return {host: self.start(host, command, more) for host in ("a", "b")}

    def finish(self, started: Mapping[str, subprocess.Popen[str]]) -> dict[str, Finished]:
        return {host: self.hosts.finish(process, SECONDS) for host, process in started.items()}

    @staticmethod
    def tell_to_stop(process: subprocess.Popen[str]) -> None:
        """As the kubelet does: SIGTERM to process number 1."""
        (first,) = psutil.Process(process.pid).children()
        first.send_signal(signal.SIGTERM)


@pytest.fixture
def make_pods(
    hosts: TwoHosts, settings: list[str], tiny_model: Path, reviews: Path, tmp_path: Path
) -> Callable[..., Pods]:
    """`make_pods("trainjob.yaml", steps, changes)`: the file with its lines edited for the two hosts."""

    def make(name: str, steps: int, changes: Mapping[str, str] | None = None) -> Pods:
        more = [*settings, "--max_steps", str(steps), "--eval_every", "100000"]
        last = "- --checkpoint_every=200     # for what gives no warning: a node that dies\n"
        indent = " " * (16 if name == "pytorchjob.yaml" else 6)
        words = ["--checkpoint_every=20", *more]
        count = (
            {'nprocPerNode: "8"': 'nprocPerNode: "1"'}
            if name == "pytorchjob.yaml"
            else {"numProcPerNode: 8": "numProcPerNode: 1"}
        )
        needed = {
            **count,
            "bert-base-chinese": str(tiny_model),
            last: "".join(f"{indent * bool(place)}- {json.dumps(word)}\n" for place, word in enumerate(words)),
        }  # fmt: skip
        pods = Pods(hosts, tmp_path, name, {**needed, **(changes or {})})
        (pods.shared / "reviews.csv").write_bytes(reviews.read_bytes())
        return pods

    return make


def assert_all(done: Mapping[str, Finished], code: int) -> None:
    for host, finished in done.items():
        assert finished.code == code, f"{host}: {finished.out[-2000:]} {finished.err[-3000:]}"


@on_two_hosts
@pytest.mark.parametrize("name", JOBS)
def test_pods_are_one_world(name: str, make_pods: Callable[..., Pods], reference: list[float]) -> None:
    """The PyTorchJob as it is, ZeRO-2; the TrainJob plain data parallel."""
    plain = name == "trainjob.yaml"
    pods = make_pods(name, 3, {"/2node_zero2.yaml": "/2node.yaml"} if plain else None)
    done = pods.finish(pods.start_both())
    assert_all(done, 0)
    assert f"machines: {pods.names['a']} (rank 0), {pods.names['b']} (rank 1)" in done["a"].err
    assert_one_world(pods.run, reference, "MULTI_CPU" if plain else "DEEPSPEED", 3)


@pytest.mark.slow
@on_two_hosts
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("host", ["a", "b"])
def test_a_pod_that_is_told_to_stop(
    host: str, name: str, make_pods: Callable[..., Pods], reference: list[float]
) -> None:
    """Neither pod ends as if the training were finished; started again, they go on."""
    pods = make_pods(name, MANY)
    started = pods.start_both()
    await_file(pods.run / "metrics.jsonl", *started.values(), lines=3)
    pods.tell_to_stop(started[host])
    told = time.monotonic()
    assert_all(pods.finish(started), 75)
    assert time.monotonic() - told < 200  # torch's launcher alone would wait 300 s for that of the other pod
    steps = len(losses_of(pods.run))
    done = pods.finish(pods.start_both(steps=steps + 5))
    assert_all(done, 0)
    assert f"step {steps} of {steps + 5}" in done["a"].err
    assert_one_world(pods.run, reference, "DEEPSPEED", steps + 5)


@pytest.mark.slow
@on_two_hosts
def test_a_pod_that_comes_late_and_one_that_fails(make_pods: Callable[..., Pods], reference: list[float]) -> None:
    """The second pod waits for the first one's name, and both for each other; a pod that is killed ends the other."""
    pods = make_pods("trainjob.yaml", MANY, {"/2node_zero2.yaml": "/2node.yaml"})
    known = pods.etc_hosts.read_text(encoding="utf-8")
    pods.etc_hosts.write_text("127.0.0.1 localhost\n", encoding="utf-8")  # in place: it is mounted
    second = pods.start("b")
    time.sleep(15)
    pods.etc_hosts.write_text(known, encoding="utf-8")
    started = {"b": second, "a": pods.start("a")}
    await_file(pods.run / "metrics.jsonl", *started.values(), lines=25)  # a checkpoint is there
    second.kill()
    assert pods.hosts.finish(started["a"], 60).code == 1
    steps = len(losses_of(pods.run)) + 5
    assert_all(pods.finish(pods.start_both(steps=steps)), 0)
    assert_one_world(pods.run, reference, "MULTI_CPU", steps)


@pytest.mark.slow
@on_two_hosts
@pytest.mark.parametrize("name", JOBS)
def test_pods_and_the_doctor(name: str, make_pods: Callable[..., Pods]) -> None:
    pods = make_pods(name, 3, {'name: DOCTOR, value: ""': 'name: DOCTOR, value: "yes"'})
    done = pods.finish(pods.start_both())
    assert_all(done, 0)
    for finished in done.values():
        assert "the machines together" in finished.out
    assert (pods.run / "report.html").is_file()


@pytest.mark.slow
@on_two_hosts
@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_other_launchers_in_a_pod(launcher: str, make_pods: Callable[..., Pods], reference: list[float]) -> None:
    """torchrun reads PET_*; RANK and WORLD_SIZE of the pods are right for one process in each."""
    pods = make_pods("pytorchjob.yaml", 3)
    (container,) = pod_spec_of(pods.name, pods.job)["containers"]
    done = pods.finish(pods.start_both([launcher, *container["args"][1:], f"--output_dir={pods.run}"]))
    assert_all(done, 0)
    assert_one_world(pods.run, reference, "MULTI_CPU", 3)


@pytest.mark.slow
@on_two_hosts
def test_one_pod_with_two_processes(make_pods: Callable[..., Pods], reference: list[float]) -> None:
    pods = make_pods("trainjob.yaml", 3, {"numNodes: 2": "numNodes: 1", "/2node_zero2.yaml": "/zero2.yaml"})
    pods.job["spec"]["trainer"]["numProcPerNode"] = 2
    assert_all(pods.finish({"a": pods.start("a")}), 0)
    assert_one_world(pods.run, reference, "DEEPSPEED", 3)


if __name__ == "__main__":
    sys.exit(srun(sys.argv[1:]))
