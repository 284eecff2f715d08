"""Our launcher: `accelerate launch`, without that one's own traceback behind a worker's clear message."""

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
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from toolkit.launch import network
from toolkit.launch.environment import started_by_accelerate_launch
from toolkit.launch.interrupted import EXIT_CODE_FILE, INTERRUPTED, LAUNCHER_PID, report_interrupt, restore_sigint
from toolkit.launch.nodes import requested_nodes
from toolkit.utils.compat import require
from toolkit.utils.log import logger
from toolkit.utils.plain_yaml import read_yaml

# How long processes have for their checkpoint after a stop signal.
_SHUTDOWN_SECONDS = 600


def launch(words: Sequence[str]) -> NoReturn:
    """Starts what these arguments of `accelerate launch` ask for, and ends with its exit code."""
    restore_sigint()  # this process has to wait for those it starts
    arguments = launch_command_parser().parse_args(list(words))
    run = require(elastic, "run", "torch")
    python_path = os.environ.get("PYTHONPATH", "")

    def run_here(options: argparse.Namespace) -> None:
        os.environ["PYTHONPATH"] = python_path  # accelerate adds the current folder, for DeepSpeed alone
        # Start this node only; its ranks find the other nodes (`nodes.set_global_ranks`). Launchers of several
        # nodes would wait for each other and ignore signals meanwhile.
        options.nnodes, options.node_rank, options.rdzv_endpoint, options.standalone = "1", 0, "", False
        options.rdzv_backend, options.rdzv_id = _OneNode.NAME, str(uuid.uuid4())
        run(options)

    elastic.run = run_here
    rendezvous.rendezvous_handler_registry.register(_OneNode.NAME, _OneNode)
    if not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU") == "true":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # what DeepSpeed would find, without its warning
    # which process it stops next adds nothing to what the failed process has reported
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_SECONDS))
    signal.signal(signal.SIGUSR1, _pass_on)  # a scheduler's warning; it would end this process and leave the others
    with tempfile.TemporaryDirectory() as folder:
        ended = Path(folder) / "ended"
        os.environ |= {EXIT_CODE_FILE: str(ended), LAUNCHER_PID: str(os.getpid())}
        arguments.config_file = str(_without_ours(Path(arguments.config_file), Path(folder)))
        code = _launch(arguments, ended, _kills_for_memory())
    _end_typed_launcher(code)
    sys.stdout.flush()
    os._exit(code)  # to take down what was imported takes Python a second


class _OneNode(StaticTCPRendezvous):
    """Of a launcher that is alone, with a store that the processes connect to: no port has to be free until they are
    there. torch's own stores listen on all addresses, and c10d unpickles what is written there."""

    NAME = "one_node"

    def __init__(self, parameters: rendezvous.RendezvousParameters) -> None:
        super().__init__(network.LOOPBACK, 0, 0, 1, parameters.run_id, _SHUTDOWN_SECONDS)

    def get_backend(self) -> str:
        return self.NAME

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """A new store for each attempt: an old one would give it the addresses of the last."""
        store = network.serve_store(network.LOOPBACK, network.listen(0, network.LOOPBACK))
        return rendezvous.RendezvousInfo(store, 0, 1, rendezvous.RendezvousStoreInfo(network.LOOPBACK, store.port))


def _without_ours(path: Path, folder: Path) -> Path:
    """The config file without the list of machines, which accelerate does not know."""
    config = read_yaml(path)
    if "machines" not in config:
        return path
    copy = folder / path.name
    copy.write_text(yaml.safe_dump({name: config[name] for name in config if name != "machines"}), encoding="utf-8")
    return copy


def _launch(arguments: argparse.Namespace, ended: Path, kills: int) -> int:
    """The exit code. `ended` is there where the processes have left their exit code themselves."""
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        # torch knows the seconds alone: where one was killed and the others failed for it, the kill came first
        killed = ((rank, failure) for rank, failure in error.failures.items() if failure.exitcode < 0)
        rank, failure = next(killed, error.get_first_failure())
        if nodes := requested_nodes():  # torchrun counts those of this machine
            rank += nodes.rank * (arguments.num_processes // nodes.count)
        return _code_of(failure.exitcode, f"rank {rank}", kills)
    except subprocess.CalledProcessError as error:
        return _code_of(error.returncode, "the process", kills)
    except (SignalException, KeyboardInterrupt) as error:
        if isinstance(error, SignalException):  # torch's launcher forgets those that it was just starting
            _pass_on(signal.SIGTERM, None)  # silent while Python starts, which SIGINT is not
        psutil.wait_procs(psutil.Process().children(), timeout=_SHUTDOWN_SECONDS)  # of one process nobody has waited
        if ended.exists():
            return int(ended.read_text(encoding="ascii"))
        if isinstance(error, KeyboardInterrupt) or error.sigval == signal.SIGINT:
            report_interrupt()
            return INTERRUPTED
        logger.error(f"error: ended by {signal.Signals(error.sigval).name}")
        return 128 + int(error.sigval)
    except (ValueError, AssertionError, FileNotFoundError) as error:
        logger.error(f"error: accelerate cannot start this: {' '.join(str(error).split())}")
        return 1
    return 0


def _pass_on(number: int, _: FrameType | None) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(number)


def _kills_for_memory() -> int:
    """How many processes the system has ended for lack of memory since it started; 0 where it does not count them."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def _code_of(exit_code: int, who: str, kills: int) -> int:
    """A worker that ended by itself has reported why; one that was killed could not. `kills`: `_kills_for_memory`
    as the run began."""
    if exit_code < 0:
        name, hint = signal.Signals(-exit_code).name, ""
        if exit_code == -signal.SIGKILL:
            hint = ", by a user, a scheduler or a program that guards memory (the system has ended nothing itself)"
            if _kills_for_memory() > kills:
                hint = ": probably by the system, for lack of memory (`dmesg | tail`)"
        again = "the same command goes on from the newest checkpoint, if one was taken (--checkpoint_every)"
        logger.error(f"error: {who} on {socket.gethostname()} was ended by {name}{hint}; {again}")
    return exit_code if exit_code > 0 else 1


def _end_typed_launcher(code: int) -> None:
    """`accelerate launch` ends with a traceback and code 1, whatever its script ended with. Where a signal stopped the
    run, that one ends it too: a scheduler sees which. (Nothing gives it another code or makes it silent.)"""
    if code - 128 in (signal.SIGTERM, signal.SIGUSR1) and started_by_accelerate_launch():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of `restarts.stop_with_parent`
        with contextlib.suppress(OSError):
            os.kill(os.getppid(), code - 128)
