"""docs/data.md, Questions often asked, and docs/titles.md: what they say of other programs' files and numbers."""

import re
import shutil
from pathlib import Path

import pytest

import toolkit
from tests import inputs
from tests.runs import ROOT, train
from toolkit.features.titles import rouge


def test_pytorch_model_bin_is_made_and_read(tmp_path: Path) -> None:
    words = ["--model_name_or_path", inputs.tiny_model(), "--train_file", inputs.reviews()]
    train(*words, "--max_steps", 1, "--report_to", "none", "--output_dir", tmp_path / "run")
    folder, texts = tmp_path / "run" / "model", ["a good film", "bad"]
    expected = toolkit.predict(folder, texts)
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program.replace("runs/NAME/model", str(folder)), {})
    (folder / "model.safetensors").unlink()
    assert toolkit.predict(folder, texts) == expected
    toolkit.convert(folder, tmp_path / "converted")
    assert (tmp_path / "converted" / "model.safetensors").is_file()
    shutil.rmtree(folder)
    assert toolkit.predict(tmp_path / "converted", texts) == expected


@pytest.mark.parametrize("page", ["titles.md", "titles.zh.md"])
def test_the_two_scores_of_rouge_chinese(page: str) -> None:
    import jieba

    rouge_chinese = pytest.importorskip("rouge_chinese")
    pair = ("今天，天气好，心情好，一切都好。", "今天天气很好，一切都好！")
    words = [" ".join(jieba.cut(text)) for text in pair]
    theirs = [each["f"] for each in rouge_chinese.Rouge().get_scores(*words)[0].values()]
    (scores,) = rouge.scores(pair[:1], pair[1:], "jieba")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    place = text.index("Rouge(exclusive=False)")
    figures = re.findall(r"0\.\d{3}", text[place:])[:6]
    assert figures == [f"{value:.3f}" for value in (*theirs, *scores.values())]
