"""However a script was started: one verified process group, and one clear line when it fails."""

from toolkit.launch import interrupted  # first: it handles Ctrl-C from here on

# isort: split
from toolkit.launch.exit_state import close_on_failure as close_on_failure
from toolkit.launch.failure import explain_failures as explain_failures
from toolkit.launch.failure import request_rerun as request_rerun
from toolkit.launch.failure import run as run
from toolkit.launch.failure import set_exit_signal as set_exit_signal
from toolkit.launch.failure import start as start
from toolkit.launch.rendezvous import list_machines as list_machines
from toolkit.launch.world import launch_info as launch_info
from toolkit.launch.world import log_on_main as log_on_main
from toolkit.launch.world import make_accelerator as make_accelerator
from toolkit.launch.world import require_equal as require_equal
from toolkit.launch.world import wait_for_all as wait_for_all
from toolkit.utils import log

interrupted.restore_sigint()
log.configure()
