"""What an edited recipe gets wrong is an error, or `toolkit verify` sees it; what trains the same is allowed.

tests/wrong_edits.txt has the edits and their answers. More errors of the loop: tests/training/test_checks.py. Edits
that train the same and are wrong are in docs/your-own-recipe.md, What no check finds.
"""

from pathlib import Path
from typing import Any

import pytest

from tests import inputs
from tests.matrix import TINY, JobError, runs
from tests.runs import ROOT
from tests.test_your_own_recipe import edited
from toolkit.features.verify.numbers import EVALUATION, LOSS, NORM, differences, numbers_of

ROUNDING = {LOSS: 1e-6, NORM: 1e-5, EVALUATION: 1e-6}
HALF_PRECISION = {LOSS: 0.1, NORM: 0.5}
IMPORT = " import toolkit\n+import torch\n"
TABLE = [*TINY, "--train_file", inputs.reviews, "--learning_rate", "5e-3", "--lr_scheduler_type", "constant",
         "--global_batch_size", 31, "--max_eval_samples", 32, "--max_steps", 8, "--eval_every", 4,
         "--checkpoint_every", 5, "--per_device_batch_size", 3]  # fmt: skip


def read_cases() -> list[Any]:
    """(edit, way, its diffs, answer) of each case."""
    _, *texts = (ROOT / "tests" / "wrong_edits.txt").read_text(encoding="utf-8").split("\n## ")
    cases = []
    for text in texts:
        head, _, body = text.partition("\n")
        name, way, answer = head.split(" | ")
        marks = () if name.endswith(" *") else pytest.mark.slow
        name = name.removesuffix(" *")
        diffs = (IMPORT, *body.strip("\n").split("\n\n"))
        cases.append(pytest.param(name, way, diffs, answer, marks=marks, id=name))
    return cases


def difference(run: Path, reference: Path, after: int = 0, limits: Any = ROUNDING) -> str:
    """The first figure that differs by more than its limit, or nothing."""
    apart = differences(numbers_of(run, after), numbers_of(reference, after), limits)
    return next((name for name, each in apart.items() if each > limits[name]), "")


def answer_to(name: str, way: str, diffs: tuple[str, ...]) -> str:
    """`error`, `hang`, `same`, or the run and the figure by which `toolkit verify` sees the edit."""
    recipe = inputs.session_folder() / f"{name}.py"
    recipe.write_text(edited(diffs), encoding="utf-8")

    def run(kind: str, way: str, *more: Any) -> Path:
        return runs(way).run(f"{name} {kind}", recipe, [*TABLE, *more], 90)

    try:
        whole = run("whole", way)
        if "fp16" in name:
            half = run("half", way, "--mixed_precision", "fp16")
            figure = difference(half, whole, limits=HALF_PRECISION)
            return f"in fp16: {figure}" if figure else "same"
        pairs = {way: (("whole", way), ("whole", "single"))}
        if way == "single":
            pairs = {"zero2": (("whole", "single"), ("whole", "zero2 x2"))}
        other = ("other sizes", "single", "--per_device_batch_size", 5)
        pairs["other micro-batches"] = (other, ("whole", "single"))
        for what in sorted(pairs, reverse=way != "single"):
            one, reference = pairs[what]
            if figure := difference(run(*one), run(*reference)):
                return f"with {what}: {figure}"
        checkpoint = whole / "checkpoints" / "step-00000005"
        figure = difference(run("resumed", way, "--resume", checkpoint), whole, after=5)
    except JobError as error:
        return "hang" if error.kind == "Ended" else "error"
    return f"resumed: {figure}" if figure else "same"


@pytest.mark.parametrize(("name", "way", "diffs", "answer"), read_cases())
def test_answer_to_a_wrong_edit(name: str, way: str, diffs: tuple[str, ...], answer: str) -> None:
    assert answer_to(name, way, diffs) == answer
