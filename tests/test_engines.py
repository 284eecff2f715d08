"""examples/engines: Ray Data and Spark give the answers of `toolkit predict`, without importing the toolkit."""

import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

import toolkit
from tests.report.made import classifier
from tests.runs import ROOT, start
from toolkit.data.labels import Labels


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "pyspark"])
def test_an_engine(engine: str, sharp_model: Path, tmp_path: Path, no_launcher: None) -> None:
    pytest.importorskip(engine)
    if engine == "pyspark" and not shutil.which("java"):
        pytest.skip("java is not installed")
    labels = Labels("single_label_classification", ("a", "b", "c"), ("label",))
    model = classifier(sharp_model, tmp_path / "model", labels)
    texts = ("good film", 'a "dull" book, very bad', "the room\nand the price", "not good")
    rows = pd.DataFrame({"id": range(150), "text": [f"{texts[i % 4]} {i}" for i in range(150)]})
    rows.to_csv(tmp_path / "new.csv", index=False)
    script = ROOT / "examples" / "engines" / f"{engine.removeprefix('py')}_label.py"
    assert "toolkit" not in script.read_text(encoding="utf-8").replace("`toolkit` read", "")
    words = [script, model, tmp_path / "new.csv", tmp_path / "out", "--batch_size", "16"]
    env = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    start([sys.executable, *words], env=env | {"RAY_USAGE_STATS_ENABLED": "0"}).succeeded()
    labelled = pd.concat(map(pd.read_parquet, (tmp_path / "out").glob("*.parquet")))
    labelled = labelled.astype({"id": int}).sort_values("id")
    assert list(labelled["id"]) == list(range(150))
    assert list(labelled["text"]) == list(rows["text"])
    expected = toolkit.predict(model, list(rows["text"]))
    assert list(labelled["prediction"]) == [line["prediction"] for line in expected]
    chances = [max(line["probabilities"]) for line in expected]
    assert list(labelled["probability"]) == pytest.approx(chances, abs=1e-5)
