"""Our launcher: `accelerate launch`, without its own traceback below a rank's error line."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil
import torch
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed import run as elastic
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from toolkit.launch import network
from toolkit.launch.environment import accelerate_launch_words
from toolkit.launch.exit_state import RESUME_HINT
from toolkit.launch.interrupted import EXIT_CODE_FILE, INTERRUPTED, LAUNCHER_PID, report_interrupt, restore_sigint
from toolkit.launch.nodes import requested_nodes
from toolkit.utils.compat import require
from toolkit.utils.files import read_yaml
from toolkit.utils.log import logger

# Time for a checkpoint after a stop signal.
_SHUTDOWN_SECONDS = 600


def launch(words: Sequence[str]) -> NoReturn:
    """Runs `accelerate launch` with these arguments and exits with its exit code."""
    restore_sigint()  # to wait for the ranks after Ctrl-C
    arguments = launch_command_parser().parse_args(list(words))
    run = require(elastic, "run", "torch")
    python_path = os.environ.get("PYTHONPATH", "")

    def run_here(options: argparse.Namespace) -> None:
        os.environ["PYTHONPATH"] = python_path  # accelerate adds the current folder, needed for DeepSpeed only
        # Start this node only; its ranks find the other nodes (`nodes.set_global_ranks`). Launchers of several
        # nodes would wait for each other and ignore signals meanwhile.
        options.nnodes, options.node_rank, options.rdzv_endpoint, options.standalone = "1", 0, "", False
        options.rdzv_backend, options.rdzv_id = _OneNode.NAME, str(uuid.uuid4())
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: torch would handle it all the same
            options.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
        run(options)

    elastic.run = run_here
    rendezvous.rendezvous_handler_registry.register(_OneNode.NAME, _OneNode)
    if not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU") == "true":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as DeepSpeed would detect, without its warning
    # the failed rank has reported: which ranks torch stops then is noise
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_SECONDS))
    signal.signal(signal.SIGUSR1, _forward_signal)  # a scheduler's warning, which would end the launcher alone
    SubprocessHandler.close = _close  # type: ignore[assignment, method-assign]
    with tempfile.TemporaryDirectory() as folder:
        exit_code_file = Path(folder) / "exit_code"
        os.environ |= {EXIT_CODE_FILE: str(exit_code_file), LAUNCHER_PID: str(os.getpid())}
        arguments.config_file = str(_drop_machines(Path(arguments.config_file), Path(folder)))
        signal.signal(signal.SIGTERM, _raise_signal)  # as torch does while it runs
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, _raise_signal)
        code = _launch(arguments, exit_code_file, _count_oom_kills())
    _end_accelerate_launch(code)
    sys.stdout.flush()
    os._exit(code)  # unloading the imports takes a second


class _OneNode(StaticTCPRendezvous):
    """One launcher's rendezvous, with a store on the loopback address and a port that is bound from the start. torch's
    own stores listen on all addresses, and c10d unpickles what is written there."""

    NAME = "one_node"

    def __init__(self, parameters: rendezvous.RendezvousParameters) -> None:
        super().__init__(network.LOOPBACK, 0, 0, 1, parameters.run_id, _SHUTDOWN_SECONDS)

    def get_backend(self) -> str:
        return self.NAME

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """A new store for each attempt: the last one holds that attempt's addresses. Its exit code is removed."""
        Path(os.environ[EXIT_CODE_FILE]).unlink(missing_ok=True)
        store = network.serve_store(network.LOOPBACK, network.listen(0, network.LOOPBACK))
        return rendezvous.RendezvousInfo(store, 0, 1, rendezvous.RendezvousStoreInfo(network.LOOPBACK, store.port))


def _drop_machines(path: Path, folder: Path) -> Path:
    """A copy of the config file without the list of machines, which accelerate rejects."""
    config = read_yaml(path)
    if "machines" not in config:
        return path
    copy = folder / path.name
    copy.write_text(yaml.safe_dump({name: config[name] for name in config if name != "machines"}), encoding="utf-8")
    return copy


_close_process, _stopped = SubprocessHandler.close, dict[int, set[int]]()


def _close(process: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
    """Stops a rank, as torch does after another rank's failure; `_stopped` gets its PID and the exit codes that this
    explains. The rank may be dead for another reason already: a GPU's memory takes time to be freed."""
    if death_sig == signal.SIGINT:  # a second Ctrl-C ends the ranks at once
        signal.signal(signal.SIGINT, _forward_signal)
    _stopped.setdefault(process.proc.pid, {-signal.SIGABRT}).add(-(death_sig or signal.SIGTERM))
    _close_process(process, death_sig)


def _launch(arguments: argparse.Namespace, exit_code_file: Path, oom_kills: int) -> int:
    """Returns the exit code: the one in `exit_code_file` if a rank has stopped the launcher."""
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        code, line = _read_report(exit_code_file)
        if code is not None and not line:  # a rank has reported
            return code
        failed = [item for item in error.failures.items() if item[1].exitcode not in _stopped.get(item[1].pid, ())]
        rank, failure = min(failed, key=_order_of_failure) if failed else error.get_first_failure()
        if nodes := requested_nodes():  # torchrun counts within this node
            rank += nodes.rank * (arguments.num_processes // nodes.count)
        return _report_exit(failure.exitcode, f"rank {rank}", oom_kills, line)
    except subprocess.CalledProcessError as error:
        return _report_exit(error.returncode, "the process", oom_kills)
    except (SignalException, KeyboardInterrupt) as error:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # more come: from each rank (`stop_launcher`), from the kernel
        if isinstance(error, SignalException):  # torch's launcher loses the ranks that it was just starting
            signal.signal(signal.SIGINT, _forward_signal)  # a terminal's reaches the launcher alone
            _forward_signal(signal.SIGTERM, None)  # unlike SIGINT it prints nothing while Python starts
        psutil.wait_procs(psutil.Process().children(), timeout=_SHUTDOWN_SECONDS)  # accelerate waits for none
        if (code := _read_report(exit_code_file)[0]) is not None:
            return code
        if isinstance(error, KeyboardInterrupt) or error.sigval == signal.SIGINT:
            report_interrupt()
            return INTERRUPTED
        logger.error(f"error: stopped by {signal.Signals(error.sigval).name}")
        return 128 + int(error.sigval)
    except (ValueError, AssertionError, FileNotFoundError, RuntimeError) as error:
        logger.error(f"error: accelerate cannot start this: {' '.join(str(error).split())}")
        return 1
    return 0


def _order_of_failure(item: tuple[int, ProcessFailure]) -> tuple[bool, ...]:
    """torch records whole seconds: a kill comes before the failures that it causes, NCCL's aborts among them."""
    return item[1].exitcode > 0, item[1].exitcode == -signal.SIGABRT, item[1].pid in _stopped


def _raise_signal(number: int, _: FrameType | None) -> None:
    raise SignalException(f"signal {number}", signal.Signals(number))


def _forward_signal(number: int, _: FrameType | None) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(number)


def _count_oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory since boot; 0 if it does not count them."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def _read_report(file: Path) -> tuple[int | None, str]:
    """What a rank has written for this launcher: its exit code, and a line if no rank has reported."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # half a report, of a rank that was killed
        code, _, line = file.read_text(encoding="utf-8").partition(" ")
        return int(code), line
    return None, ""


def _report_exit(exit_code: int, who: str, oom_kills: int, line: str = "") -> int:
    """Returns the launcher's exit code, and reports a kill: the killed process could not. `oom_kills`: as counted when
    the run began. `line`: another rank's of a process that was not killed (`os._exit`)."""
    if line and exit_code >= 0:
        logger.error(line)
    if exit_code < 0:
        name, hint = signal.Signals(-exit_code).name, ""
        if exit_code == -signal.SIGKILL:
            hint = ", by a user, a scheduler or a memory guard (not by the kernel for lack of memory)"
            if _count_oom_kills() > oom_kills:
                hint = ", probably by the kernel: out of memory (`dmesg | tail`)"
        logger.error(f"error: {who} on {socket.gethostname()} was killed by {name}{hint}{RESUME_HINT}")
    return exit_code if exit_code > 0 else 1


def _end_accelerate_launch(code: int) -> None:
    """After a stop signal, sends it to the parent `accelerate launch` too, so that a scheduler sees which. On any exit
    code of its script that launcher would print a traceback and exit with 1, which cannot be changed."""
    if code - 128 in (signal.SIGTERM, signal.SIGUSR1) and accelerate_launch_words() is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # set by `stop_with_parent`
        with contextlib.suppress(OSError):
            os.kill(os.getppid(), code - 128)
