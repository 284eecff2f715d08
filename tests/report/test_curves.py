"""toolkit/report/curves.py: long curves stay small, and their spikes are noted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.report.made import make_run, write_lines
from toolkit.data.labels import Labels
from toolkit.report import curves
from toolkit.report.record import Record


def test_a_long_noisy_curve_is_small_and_its_spike_is_noted(tmp_path: Path) -> None:
    numbers = {"loss": 0.5, "accuracy": 0.75, "f1_macro": 0.7, "custom": 2.0}
    labels = Labels("single_label_classification", ("a", "b"), ("label",))
    last = make_run(tmp_path / "run", labels, [], numbers)
    losses = np.random.default_rng(0).lognormal(size=20_000)
    losses[7], losses[9] = 999.0, np.inf
    write_lines(tmp_path / "run" / "metrics.jsonl", [
        {"step": step, "loss": loss, "learning_rate": 1e-5, "grad_norm": 1.0, "samples_per_second": 9.0,
         "peak_memory_bytes": 2**30} for step, loss in enumerate(losses.tolist(), 1)
    ])  # fmt: skip
    drawn = {chart.title: chart for chart in curves.charts(Record.load(tmp_path / "run", last))}
    assert list(drawn) == ["Loss", "Metrics on validation", "custom on validation", "Learning rate", "Gradient norm",
                           "Samples per second", "Peak memory, GiB"]  # fmt: skip
    assert len(drawn["Loss"].svg) < 60_000
    assert drawn["Loss"].note == "up to 999 at step 8"
    assert drawn["Loss"].legend == (("one", "training"), ("two", "validation"))
