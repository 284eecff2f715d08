"""`accelerate launch`, without the launcher's own traceback behind a worker's clear message.

Run as `python -m toolkit.launch.accelerate_cli ARGUMENTS`, ARGUMENTS as of `accelerate launch`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

import psutil
import torch
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed import run as elastic
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from toolkit.compat import require
from toolkit.launch.nodes import requested_nodes
from toolkit.launch.restarts import ENDED_FILE
from toolkit.plain_yaml import read_yaml

# How long processes that were told to stop have for their checkpoint.
_SHUTDOWN_SECONDS = "600"


def main() -> None:
    arguments = launch_command_parser().parse_args()
    run = require(elastic, "run", "torch")
    elastic.run = lambda given: run(_of_this_node(given))
    if not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU") == "true":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # what DeepSpeed would find, without its warning
    # its account of which process it stops next says nothing that the failed process has not said
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)
    if arguments.max_restarts:  # a store that outlives an attempt would tell the next one the addresses of the last
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        ended = Path(folder) / "ended"
        os.environ[ENDED_FILE] = str(ended)
        arguments.config_file = str(_without_ours(Path(arguments.config_file), Path(folder)))
        _launch(arguments, ended)


def _of_this_node(given: argparse.Namespace) -> argparse.Namespace:
    """torchrun starts this machine's processes alone, which find those of the others (see `nodes.span_nodes`): the
    launchers of several machines would wait for each other, deaf to signals."""
    given.nnodes, given.node_rank, given.rdzv_endpoint = "1", 0, ""
    given.standalone, given.local_addr = True, "127.0.0.1"  # at a port that is free
    return given


def _without_ours(path: Path, folder: Path) -> Path:
    """The config file without the list of machines, which accelerate does not know."""
    config = read_yaml(path)
    if "machines" not in config:
        return path
    copy = folder / path.name
    copy.write_text(yaml.safe_dump({name: config[name] for name in config if name != "machines"}), encoding="utf-8")
    return copy


def _launch(arguments: argparse.Namespace, ended: Path) -> None:
    if hasattr(signal, "SIGUSR1"):  # a scheduler's warning; it would end this process and leave the others
        signal.signal(signal.SIGUSR1, _pass_on)
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if nodes := requested_nodes(os.environ):  # torchrun counts those of this machine
            rank += nodes.rank * (arguments.num_processes // nodes.count)
        _leave(failure.exitcode, f"rank {rank}")
    except subprocess.CalledProcessError as error:
        _leave(error.returncode, "the process")
    except KeyboardInterrupt:
        sys.exit(130)
    except SignalException as error:
        if ended.exists():  # they saved a checkpoint, or failed in a way that will not go away, and said so
            sys.exit(int(ended.read_text(encoding="ascii")))
        if error.sigval != signal.SIGINT:  # a process that was interrupted says so itself
            print(f"error: ended by {signal.Signals(error.sigval).name}", file=sys.stderr)
        sys.exit(128 + error.sigval)
    except (ValueError, AssertionError, FileNotFoundError) as error:
        sys.exit(f"error: accelerate cannot start this: {' '.join(str(error).split())}")


def _pass_on(number: int, _: FrameType | None) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(number)


def _leave(exit_code: int, who: str) -> None:
    """A worker that ended by itself has said why; one that was killed could not."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = ": the system ended it, most often for want of memory (`dmesg | tail`)" if exit_code == -9 else ""
        print(f"error: {who} was ended by {name}{hint}", file=sys.stderr)
    sys.exit(exit_code if exit_code > 0 else 1)


if __name__ == "__main__":
    main()
