"""However a script was started: one verified process group, and one clear line when it fails."""

from toolkit.launch import interrupted  # first: it handles Ctrl-C from here on

# isort: split
from toolkit.launch.exit_state import close_on_failure
from toolkit.launch.failure import explain_failures, request_rerun, run, set_exit_signal, start
from toolkit.launch.rendezvous import list_machines
from toolkit.launch.world import (
    launch_info,
    log_on_main,
    make_accelerator,
    require_equal,
    set_group_timeouts,
    wait_for_all,
)
from toolkit.utils import log

__all__ = [
    "close_on_failure",
    "explain_failures",
    "launch_info",
    "list_machines",
    "log_on_main",
    "make_accelerator",
    "request_rerun",
    "require_equal",
    "run",
    "set_exit_signal",
    "set_group_timeouts",
    "start",
    "wait_for_all",
]
interrupted.restore_sigint()
log.configure()
