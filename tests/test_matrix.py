"""tests/matrix.py: each job fails alone, and what it leaves does not end the others. `main` is the job."""

import os
import signal
import sys
import time

import pytest

from tests.matrix import JobError, runs

pytestmark = pytest.mark.multiprocess
WAY = "zero1 x3"  # whose processes no other test uses


def main() -> None:
    how, is_last = sys.argv[1], os.environ["RANK"] == "2"
    print(os.getpid(), flush=True)
    if how == "raises on all" or (how == "raises on one" and is_last):
        raise ValueError("a fault")
    if how == "is killed" and is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "works":
        time.sleep(600)


def run(how: str, number: int = 0, seconds: float = 60) -> str:
    """What rank 0 printed: its process id."""
    name = f"{how} {number}"
    runs(WAY).run(name, "tests.test_matrix", [how], seconds=seconds)
    return runs(WAY).log(name)


def test_an_exception_on_all_ranks_is_a_result_and_the_processes_go_on() -> None:
    first = run("works")
    for _ in range(2):  # the second time it is read
        with pytest.raises(JobError, match="a fault") as failure:
            run("raises on all")
        assert (failure.value.kind, failure.value.message) == ("ValueError", "a fault")
    assert run("works", 1) == first
    with pytest.raises(AssertionError, match="the name of two jobs"):
        runs(WAY).run("works 1", "tests.test_matrix", ["hangs"])


@pytest.mark.parametrize(
    ("how", "kind"), [("raises on one", "ValueError"), ("is killed", "Ended"), ("hangs", "Ended")]
)  # fmt: skip
def test_a_job_that_hangs_or_fails_on_one_rank_gets_new_processes(how: str, kind: str) -> None:
    before = run("works", 10 + len(how))
    with pytest.raises(JobError) as failure:
        run(how, seconds=3 if how == "hangs" else 60)
    assert failure.value.kind == kind
    assert run("works", len(how)) != before
