"""A job for tests/test_matrix.py: `tests.faulty_job: HOW`; rank 0 prints its process id."""

import os
import signal
import sys
import time


def main() -> None:
    how, is_last = sys.argv[1], os.environ["RANK"] == "1"
    print(os.getpid(), flush=True)
    if how == "raises on all" or (how == "raises on one" and is_last):
        raise ValueError("a fault")
    if how == "is killed" and is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "works":
        time.sleep(600)
