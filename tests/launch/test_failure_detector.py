"""toolkit/launch/failure_detector.py: if one rank fails, all end, and each machine reports it once."""

import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from tests.launch.ranks import Group, codes, errors, run_group
from tests.runs import Finished
from toolkit.launch import collectives
from toolkit.launch.failure_detector import Failure, FailureDetector
from toolkit.launch.interrupted import EXIT_CODE_FILE
from toolkit.launch.rendezvous import Peer

HOST = socket.gethostname()
WAIT = "wait_for_line()"
JOIN = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
print("joined", flush=True)
"""
REDUCE = f"{JOIN}dist.all_reduce(torch.ones(1))"
# Ranks 0 and 1 have a group with one more collective.
PART = f"""{REDUCE}
part = dist.new_group([0, 1])
if dist.get_rank() < 2:
    dist.all_reduce(torch.ones(1), group=part)
wait_for_line()
"""
# Each rank waits for the other in another group.
DEADLOCK = f"""{JOIN}
groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
dist.all_reduce(torch.ones(1), group=groups[dist.get_rank()])
"""
# Rank 0 waits in DDP's backward, rank 1 for a buffer in another forward, both in C++.
BACKWARD = f"""{JOIN}
model = torch.nn.Linear(3, 1)
model.register_buffer("buffer", torch.ones(1))
model = torch.nn.parallel.DistributedDataParallel(model)
loss = model(torch.ones(2, 3)).sum()
model(torch.ones(2, 3)) if dist.get_rank() else loss.backward()
"""
READ = "def reads_slowly():\n    wait_for_line()\nreads_slowly()"
# For "within seconds" on a busy machine; without the failure detector it would be half an hour.
SOON = 30.0


def lines_of(ended: list[Finished], ranks: range | list[int]) -> list[str]:
    return [line for rank in ranks for line in ended[rank].err.splitlines()]


@pytest.fixture(scope="module")
def slow() -> Iterator[dict[str, Group]]:
    """Groups with a late rank, or with none, that run during the other tests."""
    short, impatient = {"TOOLKIT_DDP_TIMEOUT": "2"}, {1: "failure_detector._SILENCE_SECONDS = 5.0"}
    with ExitStack() as stack:
        reduce = f"{JOIN}wait_for_line()\ndist.all_reduce(torch.ones(1))"
        late = stack.enter_context(Group(reduce, JOIN + READ, JOIN + WAIT, env={"TOOLKIT_DDP_TIMEOUT": "8"}))
        headless = stack.enter_context(Group(WAIT, WAIT, env=short, before=impatient))
        idle = stack.enter_context(Group(WAIT, f"{WAIT}\nsys.exit()", WAIT, env=short, before=impatient))
        partly = stack.enter_context(Group(PART, PART, PART, env=short))
        deadlock = stack.enter_context(Group(DEADLOCK, DEADLOCK, env={"TOOLKIT_DDP_TIMEOUT": "6"}))
        backward = stack.enter_context(Group(BACKWARD, BACKWARD, env={"TOOLKIT_DDP_TIMEOUT": "6"}))
        one = stack.enter_context(
            Group(
                f"{REDUCE}\ndist.all_reduce(torch.ones(1))",
                f"{REDUCE}\nwork = dist.broadcast(torch.ones(1), 1, async_op=True)\n{READ}",
                env={"TOOLKIT_DDP_TIMEOUT": "6"},
            )
        )
        for started in (late, headless, idle, partly, deadlock, backward, one):
            started.await_line("here")
        headless.ranks[0].send_signal(signal.SIGSTOP)
        late.await_line("joined")
        late.ranks[2].send_signal(signal.SIGSTOP)
        late.release(0)
        yield {"late": late, "rank 0": headless, "idle": idle, "partly": partly, "deadlock": deadlock,
               "backward": backward, "one only": one}  # fmt: skip


def several_processes(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.multiprocess(pytest.mark.usefixtures("slow")(test))


def kill_rank_1(*bodies: str, **options: Any) -> list[Finished]:
    with Group(*bodies, **options) as started:
        started.await_line("here")
        started.await_line("joined")
        started.ranks[1].kill()
        return started.end(SOON)


@several_processes
def test_killed_rank_is_reported_once() -> None:
    ended = kill_rank_1(REDUCE, JOIN + WAIT, REDUCE)
    assert codes(ended) == [1, -signal.SIGKILL, 1]
    (line,) = errors(ended)
    assert f"rank 1 on {HOST} exited without an error message" in line
    assert "Traceback" not in "".join(one.err for one in ended)


@several_processes
def test_launchers_stop_no_rank_before_its_report() -> None:
    """A launcher sends SIGTERM to the ranks of its node when the first has exited."""
    fail = f"{WAIT}\nraise ValueError('x')"
    with ExitStack() as stack:
        runs = [stack.enter_context(Group(*(fail if rank == culprit else WAIT for rank in range(4)), hosts="AABB"))
                for culprit in range(4)]  # fmt: skip
        for culprit, started in enumerate(runs):
            started.await_line()
            started.release(culprit)
        nodes = [started.ranks[first : first + 2] for started in runs for first in (0, 2)]
        deadline = time.monotonic() + SOON
        while nodes and time.monotonic() < deadline:
            running = [[process for process in node if process.poll() is None] for node in nodes]
            for process in [processes[0] for processes in running if len(processes) == 1]:
                with suppress(ProcessLookupError):  # it has just ended
                    process.send_signal(signal.SIGTERM)
            nodes = [node for node, processes in zip(nodes, running, strict=True) if processes]
            time.sleep(0.01)
        for culprit, started in enumerate(runs):
            ended = started.end(1.0)
            name, there = f"rank {culprit} on {'AABB'[culprit]}", 2 - culprit // 2 * 2
            assert ended[culprit].err.startswith(f"[{name}] Traceback")
            assert ended[culprit].err.endswith("ValueError: x\n")
            assert ended[culprit ^ 1].err == ""  # on the same host
            (line,) = lines_of(ended, [there, there + 1])
            assert line.endswith(f"error: {name} failed: ValueError: x")


@several_processes
def test_failure_detector_off() -> None:
    """On one rank is off on all: torch notices."""
    soon = {0: "from toolkit.launch import failure\nfailure._PEER_REPORT_SECONDS = 1.0"}
    ended = kill_rank_1(REDUCE, JOIN + WAIT, env=[{}, {"TOOLKIT_FAILURE_DETECTOR": "off"}], before=soon)
    assert codes(ended) == [1, -signal.SIGKILL]
    assert "lost the connection to another process" in ended[0].error_lines[-1]


@several_processes
def test_killed_rank_with_a_living_fork() -> None:
    """Like a data loader's workers, which hold copies of its connections."""
    fork = """
helper = os.fork()
if helper == 0:
    for descriptor in range(3):
        os.close(descriptor)
    threading.Event().wait()
print(helper, flush=True)
wait_for_line()
"""
    with Group(WAIT, fork) as started:
        started.await_line()
        helper = int(started.ranks[1].line())
        try:
            started.ranks[1].kill()
            started.ranks[0].wait(60)
            assert psutil.pid_exists(helper)
        finally:
            os.kill(helper, signal.SIGKILL)
        ended = started.end(SOON)
    assert codes(ended) == [1, -signal.SIGKILL]
    (line,) = errors(ended)
    assert f"rank 1 on {HOST}" in line


@several_processes
def test_same_failure_of_all_ranks_is_reported_once_per_machine() -> None:
    fail = f"from toolkit.errors import UserError\n{WAIT}\nraise UserError('there is no file train.csv')"
    ended = run_group(fail, fail, fail, hosts=["A", "A", "B"])
    assert codes(ended) == [1, 1, 1]
    for machine in ([0, 1], [2]):
        (line,) = lines_of(ended, machine)
        assert "there is no file train.csv" in line


@several_processes
@pytest.mark.parametrize(("rank", "hosts"), [(0, "AB"), (1, "AA")])
def test_sys_exit_with_a_code_ends_all_ranks(rank: int, hosts: str) -> None:
    bodies = [WAIT, WAIT]
    bodies[rank] = f"{WAIT}\nsys.exit(3)"
    ended = run_group(*bodies, hosts=list(hosts), ranks=[rank])
    assert (ended[rank].code, ended[1 - rank].code) == (3, 1)
    of_the_other = [0, 1] if hosts == "AA" else [1 - rank]
    (line,) = [line for line in lines_of(ended, of_the_other) if "error:" in line]
    assert f"rank {rank} on {hosts[rank]}" in line


@several_processes
def test_interrupt_of_all_ranks() -> None:
    with Group(WAIT, WAIT) as started:
        started.await_line()
        for rank in started.ranks[::-1]:  # Ctrl-C reaches them all, rank 0 last
            rank.send_signal(signal.SIGINT)
            time.sleep(0.2)
        ended = started.end(SOON)
    assert codes(ended) == [130, 130]
    (line,) = lines_of(ended, range(2))
    assert "interrupted" in line


@several_processes
def test_first_cause_is_reported_though_rank_0_polls_late() -> None:
    """Rank 0's machine may be busy."""
    busy = "failure_detector.FailureDetector._receive = lambda self, rank: (time.sleep(4), receive(self, rank))[1]"
    busy = f"import time\nreceive = failure_detector.FailureDetector._receive\n{busy}"
    fail = f"{WAIT}\nraise ValueError('a consequence')"
    with Group(WAIT, WAIT, fail, before={0: busy}) as started:
        started.await_line("here")
        started.ranks[1].kill()
        started.ranks[1].wait(60)
        started.release(2)
        ended = started.end(SOON)
    assert codes(ended) == [1, -signal.SIGKILL, 1]
    (line,) = lines_of(ended, range(3))
    assert f"rank 1 on {HOST} exited without an error message" in line


@several_processes
@pytest.mark.parametrize("culprit", [0, 1])
def test_sys_exit_while_others_wait_in_a_collective(culprit: int) -> None:
    """Without a code, long before `--ddp_timeout`."""
    bodies, soon = [REDUCE, REDUCE], "failure_detector._LOG_SECONDS = 3.0"
    bodies[culprit] = f"{JOIN}sys.exit()"
    with Group(*bodies, before={0: soon, 1: soon}) as started:
        ended = started.end(SOON)
    assert codes(ended) == [1, 1]
    (line,) = errors(ended)
    assert f"the other ranks wait for rank {culprit} on {HOST} (it has ended" in line


@several_processes
@pytest.mark.parametrize("kind", ["idle", "partly"])
def test_long_work_without_collectives_is_no_failure(kind: str, slow: dict[str, Group]) -> None:
    """Longer than `--ddp_timeout`, without a collective (one rank exits by `sys.exit()`) or with one of a part of the
    ranks: rank 0 may write for an hour while the others wait for it outside of any."""
    started = slow[kind]
    time.sleep(max(0.0, started.started_at + 10 - time.monotonic()))
    assert [rank.poll() for rank in started.ranks] == [None] * 3
    started.release(0, 1, 2)
    ended = started.end()
    assert codes(ended) == [0, 0, 0]
    assert (errors(ended) if kind == "partly" else lines_of(ended, range(3))) == []
    # some of them may wait for the others in a collective that is not theirs
    assert sum("rank0.py" in line for line in lines_of(ended, range(3))) == (kind == "partly")


@several_processes
def test_late_ranks_are_named_with_their_position(slow: dict[str, Group]) -> None:
    late = slow["late"]
    late.ranks[0].wait(60)
    stopped = late.ranks[2]
    stopped.kill()  # a stopped process cannot exit
    ended = late.end(SOON)
    assert codes(ended) == [1, 1, -signal.SIGKILL]
    (line,) = errors(ended)
    assert "a collective hangs" in line
    reading, _, silent = line.partition("rank 2")
    assert f"rank 1 on {HOST} (it is at" in reading
    assert "reads_slowly" in reading
    assert f" on {HOST} (it does not answer: process {stopped.pid} there is stopped" in silent
    assert "kill -9" in silent
    assert re.search(rf"; rank 0 on {HOST} \(it waits in collective 1, at [^)]* all_reduce < rank0.py", line)


@several_processes
@pytest.mark.parametrize(
    ("kind", "calls"),
    [("deadlock", ["all_reduce"] * 2), ("backward", ["_engine_run_backward", "_distributed_broadcast_coalesced"])],
)
def test_ranks_that_all_wait_are_named_before_the_run_ends(kind: str, calls: list[str], slow: dict[str, Group]) -> None:
    ended = slow[kind].end(SOON)
    assert codes(ended) == [1, 1]
    for line in lines_of(ended, range(2)):
        for rank, call in enumerate(calls):
            assert re.search(rf"rank {rank} on {HOST} \(it waits in collective \d+, at [^)]* {call} <", line)
    assert len(lines_of(ended, range(2))) == 2
    assert len(errors(ended)) == 1


@several_processes
def test_a_collective_of_one_rank_only(slow: dict[str, Group]) -> None:
    """Rank 1 has begun as many collectives, of another kind, and does something else."""
    (line,) = errors(slow["one only"].end(SOON))
    assert re.search(rf"rank 0 on {HOST} \(it waits in collective 2, at [^)]* all_reduce < rank0.py", line)
    assert re.search(rf"rank 1 on {HOST} \(it is at [^)]*reads_slowly", line)


@several_processes
def test_collectives_that_do_not_fit_name_both_places() -> None:
    """gloo aborts the process that gets more than it expects."""
    ended = run_group(*(f"{JOIN}wait_for_line()\ndist.all_reduce(torch.ones({size}))" for size in (3000, 5000)))
    assert codes(ended) == [-signal.SIGABRT, 1]
    (line,) = errors(ended)
    first, _, second = line.partition("; rank 1 ")
    assert re.search(rf"rank 0 on {HOST} crashed \(Fatal Python error: Aborted\) at [^;]* all_reduce < rank0.py", first)
    assert re.search(r"all_reduce < rank1.py:\d+ main", second)


@several_processes
def test_an_error_of_nccl_ends_the_run_unless_a_rank_has_died() -> None:
    """The main thread waits; an error of CUDA is raised there, so NCCL's watchdog need not abort the process for it."""
    code = "failure_detector._MAX_REPORT_SECONDS = 4.0\nfailure_detector.collectives.nccl_error = lambda: 'COMM_ERROR'"
    body = f"print(os.environ['TORCH_NCCL_RETHROW_CUDA_ERRORS'], flush=True)\n{WAIT}"
    for killed, message in ((False, f"COMM_ERROR on rank 1 on {HOST}"), (True, f"rank 0 on {HOST} exited")):
        with Group(WAIT, body, before={1: code}) as started:
            started.await_line()
            assert started.ranks[1].line() == "0\n"
            if killed:
                started.ranks[0].kill()
            (line,) = errors(started.end(SOON))
        assert message in line.partition("error:")[2]


@several_processes
def test_stopped_rank_0_is_named(slow: dict[str, Group]) -> None:
    slow["rank 0"].ranks[1].wait(60)
    slow["rank 0"].ranks[0].kill()  # a stopped process cannot exit
    ended = slow["rank 0"].end()
    assert codes(ended) == [-signal.SIGKILL, 1]
    (line,) = errors(ended)
    assert f"rank 0 on {HOST}" in line
    assert "does not answer" in line


def fake_rendezvous(machines: str, rank: int, restarts_left: int = 0) -> Any:
    """`AAB`: ranks 0 and 1 on A, rank 2 on B."""
    peers = [
        Peer("", number, len(machines), machines[:number].count(machine), machines.count(machine), host=machine,
             node=f"id of {machine}", pid=100 + number, number=str(number), restarts_left=restarts_left)
        for number, machine in enumerate(machines)
    ]  # fmt: skip
    return SimpleNamespace(me=peers[rank], peers=peers, store=HashStore())


@pytest.mark.parametrize("launcher", [False, True], ids=["any launcher", "our launcher"])
@pytest.mark.parametrize(
    ("kind", "culprit", "any_launcher", "our_launcher"),
    [("failed", 1, [2], [2]), ("failed", 2, [0], [0]),  # it reports itself; on the other machine its first rank does
     ("gone", 0, [1, 2], [2]), ("gone", 1, [0, 2], [2]), ("gone", 2, [0, 3], [0]),  # there our launcher reports it
     ("late", 0, [1, 2], [1, 2]), ("lost", 2, [0, 3], [0, 3]), ("interrupted", 3, [0], [0])],
)  # fmt: skip
def test_one_process_per_machine_reports(
    monkeypatch: pytest.MonkeyPatch, kind: Any, culprit: int, any_launcher: list[int], our_launcher: list[int],
    launcher: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv(EXIT_CODE_FILE, "x")
    if not launcher:
        monkeypatch.delenv(EXIT_CODE_FILE)
    detectors = [FailureDetector(fake_rendezvous("AABB", rank)) for rank in range(4) if rank != culprit]
    reporting = [each.me.rank for each in detectors if each.reports_for_node(Failure(culprit, kind, ""))]
    assert reporting == (our_launcher if launcher else any_launcher)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")  # a launcher that restarts is silent
    reporting = [each.me.rank for each in detectors if each.reports_for_node(Failure(culprit, kind, ""))]
    assert reporting == any_launcher


@pytest.mark.parametrize(
    ("permanent", "maximum", "left", "forbids"),
    [(True, 3, 3, True), (False, 3, 1, False), (False, 3, 0, True), (False, 0, 0, False)],
)
def test_restart_needs_restarts_left_on_all_nodes(
    monkeypatch: pytest.MonkeyPatch, permanent: bool, maximum: int, left: int, forbids: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(maximum))
    assert FailureDetector(fake_rendezvous("AB", 0, left)).forbids_restart(permanent) == forbids


def test_collectives_of_objects_count_on_another_backend_than_tensors(no_launcher: None, one_process: None) -> None:
    """As accelerate makes the group of FSDP2 on GPUs (cuda:nccl,cpu:gloo), with gloo in NCCL's place."""
    world, nccl = dist.group.WORLD, dist.ProcessGroup.BackendType.NCCL
    world._register_backend(torch.device("cuda"), nccl, dist.new_group()._get_backend(torch.device("cpu")))
    world._set_default_backend(nccl)
    before = collectives.count()
    dist.broadcast_object_list([1])
    assert world._get_sequence_number_for_group() == 0
    assert collectives.count() > before


def test_a_position_is_read_while_frames_return(monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(frame: Any) -> Iterator[tuple[Any, int]]:
        yield frame, 7
        raise AttributeError("'cell' object has no attribute 'f_lineno'")  # once, under load, in CPython 3.11

    monkeypatch.setattr(traceback, "walk_stack", walk)
    assert ":7 " in collectives.main_thread_position()
