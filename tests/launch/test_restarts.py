"""`torchrun --max_restarts`: its store keeps the addresses of the processes that have died."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.runs import losses_of, start

SCRIPT = """
import os, sys
from pathlib import Path
sys.path.insert(0, {repository!r})
from toolkit import launch
from recipes import cls
from toolkit.training.steps import Step

mean, died = Step.mean, Path({died!r})

def mean_or_die(step, losses):
    if step.number == 3 and os.environ["RANK"] == "1" and not died.exists():
        died.touch()
        os._exit(7)
    return mean(step, losses)

Step.mean = mean_or_die
if __name__ == "__main__":
    launch.run(cls.main)
"""


@pytest.mark.multiprocess
def test_a_run_that_torchrun_restarts(tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    script, died, run = tmp_path / "once.py", tmp_path / "died", tmp_path / "run"
    script.write_text(SCRIPT.format(repository=str(REPOSITORY), died=str(died)), encoding="utf-8")
    words = ["--model_name_or_path", tiny_model, "--train_file", reviews, "--max_steps", 6, "--checkpoint_every", 2,
             "--report_to", "none", "--mixed_precision", "no", "--output_dir", run]  # fmt: skip
    launcher = ["torchrun", "--standalone", "--nproc_per_node", 2, "--max_restarts", 1]
    done = start([str(word) for word in (*launcher, script, *words)], 200).succeeded()
    assert died.exists()
    assert "step 2 of 6" in done.err
    assert len(losses_of(run)) == 6
