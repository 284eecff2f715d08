"""`accelerate launch`, without the launcher's own traceback behind a worker's clear message.

Run as `python -m toolkit.launch.accelerate_cli ARGUMENTS`, ARGUMENTS as of `accelerate launch`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    arguments = launch_command_parser().parse_args()
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # what DeepSpeed would find, without its warning
    # its account of which process it stops next says nothing that the failed process has not said
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _leave(failure.exitcode, f"rank {rank}")
    except subprocess.CalledProcessError as error:
        _leave(error.returncode, "the process")
    except KeyboardInterrupt:
        sys.exit(130)
    except SignalException as error:
        if error.sigval != signal.SIGINT:  # a process that was interrupted says so itself
            print(f"error: ended by {signal.Signals(error.sigval).name}", file=sys.stderr)
        sys.exit(128 + error.sigval)
    except (ValueError, ConnectionError, AssertionError, FileNotFoundError) as error:
        sys.exit(f"error: accelerate cannot start this: {' '.join(str(error).split())}")


def _leave(exit_code: int, who: str) -> None:
    """A worker that ended by itself has said why; one that was killed could not."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = ": the system ended it, most often for want of memory (`dmesg | tail`)" if exit_code == -9 else ""
        print(f"error: {who} was ended by {name}{hint}", file=sys.stderr)
    sys.exit(exit_code if exit_code > 0 else 1)


if __name__ == "__main__":
    main()
