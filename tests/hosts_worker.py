"""A script of a user's, started on several hosts: the processes meet, and each says who it is.

python tests/hosts_worker.py [--launch options]
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from toolkit import launch
from toolkit.launch import rank_rendezvous

if seconds := os.environ.get("CLAIMS_LATE"):  # the store is up, and another rank 0 may be the first to use it
    opened = rank_rendezvous._open_store

    def open_slowly(*given: Any) -> Any:
        store = opened(*given)
        time.sleep(float(seconds))
        return store

    rank_rendezvous._open_store = open_slowly


def main() -> None:
    accelerator = launch.make_accelerator()
    names = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT")
    environment = " ".join(f"{name}={os.environ.get(name)}" for name in names)
    accelerator.wait_for_everyone()
    print(
        f"rank {accelerator.process_index} of {accelerator.num_processes} on {socket.gethostname()} {environment}",
        flush=True,
    )


if __name__ == "__main__":
    launch.run(main)
