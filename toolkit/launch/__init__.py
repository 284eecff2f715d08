"""However a script was started: one verified process group, and one clear line when it fails."""

from toolkit.launch import interrupted  # first: Ctrl-C is answered from here on

# isort: split
from toolkit.launch.bad_end import close_at_bad_end
from toolkit.launch.failure import explain_failures, once_more, run, start, stopped_by
from toolkit.launch.rendezvous import named_machines
from toolkit.launch.world import how_launched, make_accelerator, same_everywhere, say, wait_for_all
from toolkit.utils import log

__all__ = [
    "close_at_bad_end",
    "explain_failures",
    "how_launched",
    "interrupted",
    "make_accelerator",
    "named_machines",
    "once_more",
    "run",
    "same_everywhere",
    "say",
    "start",
    "stopped_by",
    "wait_for_all",
]
interrupted.raise_again()
log.configure()
