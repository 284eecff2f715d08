"""A user's script on several hosts: the ranks join, and each prints its rank and environment.

python tests/hosts_worker.py [--launch options]
"""

import os
import socket

from toolkit import launch


def main() -> None:
    accelerator = launch.make_accelerator()
    names = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT")
    environment = " ".join(f"{name}={os.environ.get(name)}" for name in names)
    accelerator.wait_for_everyone()
    rank = f"rank {accelerator.process_index} of {accelerator.num_processes}"
    print(f"{rank} on {socket.gethostname()} {environment}", flush=True)


if __name__ == "__main__":
    launch.run(main)
