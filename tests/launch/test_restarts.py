"""`torchrun --max_restarts`: its store keeps the addresses of the processes that have died."""

from pathlib import Path

import pytest

from tests.runs import ROOT, losses_of, start

SCRIPT = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from toolkit import launch
from recipes import cls
from toolkit.training.steps import Step

mean, died = Step.mean, Path(__file__).with_name("died")

def mean_or_die(step, losses):
    if step.number == 3 and os.environ["RANK"] == "1" and not died.exists():
        died.touch()
        os._exit(7)
    return mean(step, losses)

Step.mean = mean_or_die
launch.run(cls.main)
"""


@pytest.mark.multiprocess
def test_a_run_that_torchrun_restarts(tiny_job: list[str], tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(SCRIPT, encoding="utf-8")
    launcher = "torchrun --standalone --nproc_per_node 2 --max_restarts 1".split()
    words = "--global_batch_size 12 --max_steps 6 --checkpoint_every 2 --output_dir".split()
    script = [tmp_path / "once.py", *tiny_job, *words, tmp_path / "run"]
    done = start([*launcher, *script], 200).succeeded()
    assert (tmp_path / "died").exists()
    assert "step 2 of 6" in done.err
    assert len(losses_of(tmp_path / "run")) == 6
