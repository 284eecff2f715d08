"""docs/run-folder.md: the lines that attribute an answer to its words do what the page says."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.report.made import classifier
from tests.runs import ROOT
from toolkit.data.labels import Labels


def test_the_numbers_add_up(sharp_model: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("captum")
    labels = Labels("single_label_classification", ("a", "b"), ("label",))
    folder = classifier(sharp_model, tmp_path / "model", labels)
    page = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(code.replace("runs/NAME/model", str(folder)), encoding="utf-8")
    names = runpy.run_path(str(script))
    margins = [names["margin"](names[ids]).item() for ids in ("ids", "padding")]
    difference = margins[0] - margins[1]
    assert abs(difference) > 0.01
    assert names["values"].sum().item() == pytest.approx(difference, rel=2e-2, abs=2e-3)
    assert len(capsys.readouterr().out.splitlines()) == names["ids"].shape[1]
