"""However a script was started: one verified process group, and one clear line when it fails.

Who starts, meets, watches and stops whom, for `--config_file` after the script:

    python recipes/cls.py --config_file 2node.yaml            the same command on machine 1
                |                                                         |
    launcher of machine 0  <--- meet; heartbeats; first failure --->  launcher of machine 1
      serves one store on one address                                     |
       starts | watches | stops                                  starts | watches | stops
         rank 0    rank 1     <--- process group (gloo, NCCL) --->   rank 2    rank 3

- `options` reads what follows the script, the accelerate YAML and the DeepSpeed JSON; `machines`
  says which machine this is, and why. Without a config file this process is a rank itself.
- `launcher` starts this machine's ranks. `meet`: each launcher writes what it knows of itself into
  the store and reads what the others have written: who is missing, who is there twice, and which
  versions differ. Torch's process group forms in the same store; each restart has its own keys.
- A rank (`world`) makes the process group and the `accelerator`, for the strategy that was asked
  for (`strategy`, `precision`), and compares the world with the one that was asked for. It watches
  nobody: when it fails, it writes why into a file, and exits (`failure`). Its launcher sees that it
  has ended, and how.
- `heartbeat`: launchers count up in the store. The first failure is published there, a machine that
  no longer counts is one, and each launcher then stops its ranks and prints the same line.
- Signals go to the launcher, which passes them on; ranks stop after their step (`signals`). If a
  launcher is killed, Linux stops its ranks, and the other launchers miss its heartbeat.
- `network` has addresses, ports, and why a machine cannot be reached.

Under `torchrun`, `accelerate launch --config_file FILE script`, `deepspeed`, `mpirun` and `srun`
(`environment`) that program starts, watches and stops the ranks of its machine. The ranks meet in
a store that rank 0 serves, or the launcher. If there are several machines, the first rank of each
keeps the heartbeat, in a thread, and ends its process when another machine is lost (`ranks`).
In every case the ranks compare their files and settings in the store, as the launchers do.
"""

from toolkit.launch.environment import launch_info as launch_info
from toolkit.launch.failure import exit_state as exit_state
from toolkit.launch.failure import run as run
from toolkit.launch.ranks import list_machines as list_machines
from toolkit.launch.ranks import require_equal as require_equal
from toolkit.launch.world import make_accelerator as make_accelerator
from toolkit.utils import log

log.configure()
