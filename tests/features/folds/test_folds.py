"""--folds in whole runs: one prediction for each row, equal under every launch, resumed after a stop."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.runs import WAYS, Finished, lines_of, losses_of, recipe, start, train
from toolkit.features.folds.page import write_folds

COMMON = ["--max_steps", 4, "--eval_every", 2, "--checkpoint_every", 2, "--global_batch_size", 12, "--dropout", 0,
          "--per_device_batch_size", 5, "--learning_rate", "3e-3", "--report_to", "none", "--mixed_precision", "no",
          "--text_column", "text", "--folds", 3]  # fmt: skip
NASTY = "</script><script>document.title = 'broken'</script> & \"quoted\""
Single = tuple[Path, Finished]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, reviews: Path) -> Path:
    table = pd.read_csv(reviews)[:80]
    table["source"] = ["web" if place % 3 else "shop" for place in range(80)]
    table.loc[70:79, "text"] = (
        table["text"][:10].str.upper().to_list()
    )  # near duplicates of the first ten
    table.loc[3, "text"] = NASTY
    path = tmp_path_factory.mktemp("folds") / "rows.csv"
    table.to_csv(path, index=False)
    return path


def run(way: str, rows: Path, model: Path, folder: Path, *more: Any) -> Finished:
    data = ["--train_file", rows, "--model_name_or_path", model, "--output_dir", folder]
    return recipe(*COMMON, *data, *more, *WAYS[way])


@pytest.fixture(scope="module")
def single(rows: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Single:
    folder = tmp_path_factory.mktemp("single") / "run"
    done = run("single", rows, tiny_model, folder).succeeded()
    return folder, done


def assert_same(folder: Path, other: Path) -> None:
    for fold in (1, 2, 3):
        losses, expected = losses_of(folder / f"fold-{fold}"), losses_of(other / f"fold-{fold}")
        assert losses == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(
        *(lines_of(path / "out_of_fold.jsonl") for path in (folder, other)), strict=True
    ):
        assert mine.pop("probabilities") == pytest.approx(theirs.pop("probabilities"), abs=1e-4)
        assert mine == theirs


def test_every_row_is_predicted_once_by_the_model_of_its_fold(single: Single, rows: Path) -> None:
    folder, done = single
    lines, table = lines_of(folder / "out_of_fold.jsonl"), pd.read_csv(rows)
    assert [line["id"] for line in lines] == list(range(80))
    assert [(line["text"], line["label"]) for line in lines] == list(
        zip(table["text"], table["label"], strict=True)
    )
    for fold in (1, 2, 3):
        part = [line for line in lines if line["fold"] == fold]
        run = folder / f"fold-{fold}"
        expected = [(line["id"], line["probabilities"]) for line in part]
        assert [
            (line["id"], line["probabilities"]) for line in lines_of(run / "predictions.jsonl")
        ] == expected
        assert json.loads((run / "config.json").read_text())["data"]["samples"][
            "validation"
        ] == len(part)
    assert len({tuple(losses_of(folder / f"fold-{fold}")) for fold in (1, 2, 3)}) == 3
    assert "next:" not in done.out  # each fold started the next one
    errors = lines_of(folder / "label_errors.jsonl")
    assert all(
        error["original_label"] == table["label"][error["id"]] != error["label"] for error in errors
    )


def test_suspects_of_poor_models_come_with_a_warning(single: Single, tmp_path: Path) -> None:
    """One answer for all rows: labels equal to it are not suspected, and warnings precede the list. So do settings that
    changed between folds."""
    folder = tmp_path / "run"
    shutil.copytree(single[0], folder, symlinks=True)
    for part in folder.glob("fold-*/out_of_fold.jsonl"):
        chances = [0.6 + line["id"] / 400 for line in lines_of(part)]
        lines = [line | {"prediction": "neg", "probabilities": [chance, 1 - chance]}
                 for line, chance in zip(lines_of(part), chances, strict=True)]  # fmt: skip
        part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = json.loads((folder / "fold-2" / "config.json").read_text())
    config["settings"]["learning_rate"] = 1.0
    (folder / "fold-2" / "config.json").write_text(json.dumps(config))
    screen = write_folds(folder)
    share = sum(line["label"] == "neg" for line in lines_of(folder / "out_of_fold.jsonl")) / 0.8
    assert screen[0].count(f"{share:.1f} %") == 2
    assert "never predict pos" in screen[1]
    assert "--num_train_epochs" in screen[1]
    assert screen[2].endswith(": learning_rate")
    assert {line["original_label"] for line in lines_of(folder / "label_errors.jsonl")} == {"pos"}
    page = (folder / "report.html").read_text()
    assert page.index("never predict pos") < page.index("<select data-id=")


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["ddp x2", pytest.param("zero3 x2", marks=pytest.mark.slow),
                                 pytest.param("fsdp2 x2", marks=pytest.mark.slow)])  # fmt: skip
def test_the_same_under_every_launch(
    way: str, single: Single, rows: Path, tiny_model: Path, tmp_path: Path
) -> None:
    run(way, rows, tiny_model, tmp_path / "run").succeeded()
    assert_same(tmp_path / "run", single[0])


def test_unfinished_folds_continue(
    single: Single, rows: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Fold 2 was stopped at step 2, fold 3 before its first checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(single[0], folder, symlinks=True)
    for name in ("out_of_fold.jsonl", "label_errors.jsonl", "report.html", "fold-2/out_of_fold.jsonl",
                 "fold-2/report.html", "fold-3/out_of_fold.jsonl"):  # fmt: skip
        (folder / name).unlink()
    (folder / "fold-2/checkpoints/last").unlink()
    shutil.rmtree(folder / "fold-2/checkpoints/step-00000004")
    shutil.rmtree(folder / "fold-3/checkpoints")
    first = (folder / "fold-1/model/model.safetensors").stat().st_mtime_ns
    incomplete = start(["toolkit", "report", folder])
    assert (incomplete.code, "fold 2, 3 has not finished" in incomplete.err) == (1, True)
    done = run("single", rows, tiny_model, folder).succeeded()
    assert (
        len(re.findall("resuming from .*fold-2/checkpoints/step-00000002: step 2 of 4", done.err))
        == 1
    )
    assert (folder / "fold-1/model/model.safetensors").stat().st_mtime_ns == first
    assert [path.name[:11] for path in sorted(folder.glob("fold-3*"))] == ["fold-3", "fold-3.old-"]
    assert_same(folder, single[0])
    again = run("single", rows, tiny_model, folder)
    assert (again.code, "all 3 folds are done" in again.err) == (1, True)
    (folder / "report.html").unlink()
    assert start(["toolkit", "report", folder]).out.strip() == str(folder / "report.html")
    assert (folder / "report.html").is_file()


CHOOSE = """<script>
document.getElementById("accept").click();
boxes[1].value = "null";
boxes[2].value = "";
document.body.textContent = corrections();
</script></body>"""


def test_corrections_of_the_page_are_taken(
    single: Single, rows: Path, tiny_model: Path, tmp_path: Path
) -> None:
    folder, _ = single
    page = (folder / "report.html").read_text()
    assert "document.title = 'broken'" not in re.sub(r"&lt;.*?&gt;", "", page)
    assert not re.search(r"https?://", page)
    assert "Near duplicates" in page
    errors = lines_of(folder / "label_errors.jsonl")
    assert len(errors) > 3
    assert page.count("<select data-id=") == len(errors)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser")
    (tmp_path / "page.html").write_text(page.replace("</body>", CHOOSE))
    shown = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
                            f"--user-data-dir={tmp_path / 'browser'}", f"file://{tmp_path / 'page.html'}"],
                           capture_output=True, text=True, timeout=60, check=True).stdout  # fmt: skip
    saved = re.search(r"<body>(.*)</body>", shown, re.DOTALL)
    assert saved
    lines = [json.loads(line) for line in saved[1].strip().splitlines()]
    expected = [{name: error[name] for name in ("id", "text_digest", "label")} for error in errors]
    assert lines == [expected[0], expected[1] | {"label": None}, *expected[3:]]
    (tmp_path / "corrections.jsonl").write_text(saved[1].strip())
    settings = [
        "--train_file",
        rows,
        "--model_name_or_path",
        tiny_model,
        "--output_dir",
        tmp_path / "run",
    ]
    screen = train(*COMMON[:-2], *settings, "--label_corrections", tmp_path / "corrections.jsonl")
    assert f"{len(lines) - 1} labels changed, 0 unchanged, 1 rows left out" in screen
