"""What servers make of a model folder and of `toolkit export --to server`: their rules, as their sources have them
(docs/serving.md says which), on the folders of real runs. Promise 7: what is trained is what is served."""

import argparse
import http.server
import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    FunnelConfig,
    FunnelForSequenceClassification,
)

import toolkit
from tests import inputs
from tests.architectures import ARCHITECTURES, make_architecture
from tests.faults import refusal
from tests.matrix import TINY, runs
from tests.runs import ROOT, edit_json, environment, lines_of, slow_but, start
from toolkit.checkpoint.model_folder import save_model
from toolkit.config import ModelSettings
from toolkit.data.jieba_tokenizer import words_first
from toolkit.data.labels import Labels
from toolkit.evaluation.self_test import check_folder
from toolkit.features.export.command import export
from toolkit.models.classifier import load_classifier

FILE = "sentence_bert_config.json"


@inputs.made_once("rows.csv")
def seven_classes(folder: Path) -> None:
    table = pd.read_csv(inputs.reviews())
    table["label"] = [f"class {len(text) % 7}" for text in table["text"]]
    table.to_csv(folder / "rows.csv", index=False)


@inputs.made_once("rows.csv")
def pairs(folder: Path) -> None:
    table = pd.read_csv(inputs.uneven_reviews())
    table[["text", "other", "label"]].to_csv(folder / "rows.csv", index=False)


@inputs.made_once()
def two_token_types(folder: Path) -> None:
    """The sharp BERT, with a token type for each text of a pair."""
    shutil.copytree(inputs.sharp_model(), folder, dirs_exist_ok=True)
    edit_json(folder / "config.json", type_vocab_size=2)
    weights = load_file(folder / "model.safetensors")
    types = weights["embeddings.token_type_embeddings.weight"]
    weights["embeddings.token_type_embeddings.weight"] = torch.cat([types, types.flip(1)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def labelled(kind: str) -> Any:
    return partial(inputs.labelled, kind, "train")


SHORT = [*TINY, "--model_name_or_path", inputs.sharp_model, "--max_steps", 8, "--eval_every", 2,
         "--learning_rate", "1e-2", "--data_seed", 3, "--global_batch_size", 20, "--metric_for_best_model", "loss",
         "--max_length", 24]  # fmt: skip
LORA = ["--lora_r", 3]
TUNED = ["--calibrate", "--tune_thresholds"]
JOBS: dict[str, list[Any]] = {
    "two": [*SHORT, "--train_file", inputs.reviews, *TUNED, "precision_at_recall=0.9", "--positive_class", "neg",
            "--abstain_below", 0.55, "--checkpoint_every", 4],
    "several": [*SHORT, "--train_file", labelled("multi-label"), *TUNED, "f1", "--save_dtype", "bf16"],
    "seven": [*SHORT, "--train_file", seven_classes, *LORA],
    "number": [*SHORT, "--train_file", labelled("regression"), *LORA],
    "numbers": [*SHORT, "--train_file", labelled("several numbers"), "--label_column", "length,good"],
    "pairs": [*SHORT, "--model_name_or_path", two_token_types, "--train_file", pairs, "--text_column", "text",
              "--text_pair", "other", "--label_column", "label", *LORA],
}  # fmt: skip


def run_of(name: str) -> Path:
    return runs("single").run(f"served {name}", "recipes.cls", JOBS[name])


def texts_of(name: str) -> list[list[str]]:
    """The texts or pairs of some rows, most of them longer than the model reads."""
    file = JOBS[name][JOBS[name].index("--train_file") + 1]()
    table = pd.DataFrame(lines_of(file)) if file.suffix == ".jsonl" else pd.read_csv(file)
    columns = ["text", "other"] if name == "pairs" else ["text"]
    return [list(row) for row in table[columns].head(30).itertuples(index=False)]


def predict(folder: Path, texts: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    rows = [tuple(each) if len(each) == 2 else each[0] for each in texts]
    return list(toolkit.predict(folder, rows, mixed_precision="no"))


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return dict(json.loads((folder / name).read_text(encoding="utf-8")))


def tei_length(folder: Path) -> int:
    config = read(folder)
    if (folder / FILE).is_file():
        return int(read(folder, FILE)["max_seq_length"])
    offset = 0
    if config["model_type"] in ("roberta", "xlm-roberta", "camembert"):
        offset = config["pad_token_id"] + 1
    return int(config["max_position_embeddings"]) - offset


def tei(
    folder: Path, inputs: list[list[str]], truncate: bool = False, raw_scores: bool = False,
    truncation_direction: str = "Right",
) -> list[list[dict[str, Any]]]:  # fmt: skip
    """POST /predict of Text Embeddings Inference, with texts [text] and pairs [text, text]."""
    config = read(folder)
    assert config["architectures"][0].endswith("Classification")
    assert set(config["label2id"].values()) == set(map(int, config["id2label"]))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if truncate:
        tokenizer.enable_truncation(tei_length(folder), direction=truncation_direction.lower())
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for texts in inputs:
        encoded = tokenizer.encode(*texts)
        assert "".join(texts)
        assert len(encoded) <= tei_length(folder)
        assert max(encoded.type_ids) < config.get("type_vocab_size", 1)
        with torch.no_grad():
            ids, types = (torch.tensor([each]) for each in (encoded.ids, encoded.type_ids))
            scores = model(input_ids=ids, token_type_ids=types).logits[0]
        if not raw_scores:
            scores = scores.softmax(0) if len(scores) > 1 else scores.sigmoid()
        lines = [
            {"score": float(each), "label": config["id2label"][str(place)]}
            for place, each in enumerate(scores)
        ]
        answers.append(sorted(lines, key=lambda line: -line["score"]))
    return answers


def vllm_length(folder: Path) -> int:
    limits = [read(folder)["max_position_embeddings"]]
    limits.append(read(folder, "tokenizer_config.json")["model_max_length"])
    if (folder / FILE).is_file() and {"max_seq_length", "do_lower_case"} <= read(
        folder, FILE
    ).keys():
        return int(read(folder, FILE)["max_seq_length"])
    return int(min(limits))


def vllm(
    folder: Path,
    input: list[str],
    truncate_prompt_tokens: int | None = None,
    use_activation: bool = True,
) -> list[dict[str, Any]]:
    """`data` of POST /classify of vLLM."""
    config, tokenizer = read(folder), AutoTokenizer.from_pretrained(folder)
    assert truncate_prompt_tokens in (None, -1)
    truncation: dict[str, Any] = {}
    if truncate_prompt_tokens == -1:
        truncation = {"truncation": True, "max_length": vllm_length(folder)}
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    data = []
    for text in input:
        encoded = tokenizer(text, return_tensors="pt", **truncation)
        assert encoded["input_ids"].shape[1] <= vllm_length(folder)
        with torch.no_grad():
            scores = model(input_ids=encoded["input_ids"]).logits[0]
        if use_activation and config["problem_type"] == "multi_label_classification":
            scores = scores.sigmoid()
        elif use_activation and config["problem_type"] == "single_label_classification":
            scores = scores.softmax(0) if len(scores) > 1 else scores.sigmoid()
        label = config["id2label"][str(int(scores.argmax()))]
        data.append({"label": label, "probs": scores.tolist()})
    return data


def by_label(answers: list[list[dict[str, Any]]], names: Sequence[str]) -> np.ndarray:
    """TEI's scores in the order of the labels: (N, C)."""
    rows = [{line["label"]: line["score"] for line in lines} for lines in answers]
    return np.array([[row[name] for name in names] for row in rows])


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return np.array(1 / (1 + np.exp(-logits)))


@pytest.mark.parametrize("name", ["seven", "number", "numbers", "pairs"])
def test_servers_answer_as_predict_does(name: str) -> None:
    """By the requests of docs/serving.md, for texts longer than the model was trained to read: without the file of
    lengths, TEI would read more of them."""
    folder, texts = run_of(name) / "model", texts_of(name)
    names = list(read(folder)["id2label"].values())
    lines = predict(folder, texts)
    is_number = name in ("number", "numbers")
    expected = np.array([line["prediction" if is_number else "probabilities"] for line in lines])
    assert tei_length(folder) == vllm_length(folder) == 24
    options = {"truncate": True, "raw_scores": is_number}
    scores = by_label(tei(folder, texts, **options), names)
    np.testing.assert_allclose(scores, expected.reshape(len(texts), -1), rtol=0, atol=2e-6)
    if name != "pairs":
        data = vllm(folder, [text for (text,) in texts], truncate_prompt_tokens=-1)
        scores = np.array([row["probs"] for row in data])
        np.testing.assert_allclose(scores, expected.reshape(len(texts), -1), rtol=0, atol=2e-6)
        if name == "seven":
            assert [row["label"] for row in data] == [line["prediction"] for line in lines]


def test_without_the_file_of_lengths_a_server_reads_more(tmp_path: Path) -> None:
    folder = shutil.copytree(run_of("seven") / "model", tmp_path / "model")
    names, texts = list(read(folder)["id2label"].values()), texts_of("seven")
    trained = by_label(tei(folder, texts, truncate=True), names)
    (folder / FILE).unlink()
    assert tei_length(folder) == 131
    assert np.abs(by_label(tei(folder, texts, truncate=True), names) - trained).max() > 1e-3


def test_a_converted_checkpoint_has_the_length(tmp_path: Path) -> None:
    toolkit.convert(run_of("two") / "checkpoints" / "best", tmp_path / "out")
    assert tei_length(tmp_path / "out") == vllm_length(tmp_path / "out") == 24


def options(model: Path, out: Path, **more: Any) -> argparse.Namespace:
    defaults = {"to": "server", "int8": False, "max_changed": 2, "self_test": "error"}
    return argparse.Namespace(model=str(model), out=str(out), **(defaults | more))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name of a job -> its folder for servers, and what the command printed."""
    folder = tmp_path_factory.mktemp("served")

    def folder_of(name: str) -> tuple[Path, str]:
        words = ["toolkit", "export", run_of(name) / "model", folder / name, "--to", "server"]
        return folder / name, start(words).succeeded().out

    return {name: folder_of(name) for name in ("two", "several")}


def test_two_classes_with_threshold_and_temperature(exported: Any) -> None:
    """TEI and vLLM, which know neither, give predict's answers; a score is what card and page say it is."""
    model, (folder, printed) = run_of("two") / "model", exported["two"]
    decisions, texts = read(model, "decisions.json"), texts_of("two")
    before, after = predict(model, texts), predict(folder, texts)
    threshold = decisions["thresholds"]["neg"]
    chances = np.array([line["probabilities"][0] for line in before])
    expected = np.where(chances > threshold, "neg", "pos").tolist()
    assert set(expected) == {"neg", "pos"}
    plain = vllm(model, [text for (text,) in texts], truncate_prompt_tokens=-1)
    assert [row["label"] for row in plain] != expected  # without the threshold
    assert [line["prediction"] for line in after] == expected
    answers = tei(folder, texts, truncate=True)
    assert [lines[0]["label"] for lines in answers] == expected
    data = vllm(folder, [text for (text,) in texts], truncate_prompt_tokens=-1)
    assert [row["label"] for row in data] == expected
    formula = chances * (1 - threshold)
    formula /= formula + (1 - chances) * threshold
    np.testing.assert_allclose(by_label(answers, ["neg"])[:, 0], formula, rtol=0, atol=3e-6)
    # predict abstains with the model, and no server does
    assert None in [line["prediction"] for line in before]
    card = (folder / "README.md").read_text(encoding="utf-8")
    for text in (printed, card):
        assert "abstain_below" in text.split("## Exported for servers")[-1]
        assert "p (1 - t) / (p (1 - t) + (1 - p) t)" in text
    assert not (folder / "decisions.json").exists()
    assert check_folder(str(folder))
    assert tei_length(folder) == vllm_length(folder) == 24


def test_several_labels_with_thresholds(exported: Any) -> None:
    """TEI's softmax is of no use for them: raw scores above 0 are the answer."""
    model, (folder, _) = run_of("several") / "model", exported["several"]
    names, texts = list(read(model)["id2label"].values()), texts_of("several")
    thresholds = [read(model, "decisions.json")["thresholds"][name] for name in names]
    lines = predict(model, texts)
    assert [line["prediction"] for line in predict(folder, texts)] == [
        line["prediction"] for line in lines
    ]
    raw = by_label(tei(folder, texts, truncate=True, raw_scores=True), names)
    data = vllm(folder, [text for (text,) in texts], truncate_prompt_tokens=-1)
    for scores in (sigmoid(raw), np.array([row["probs"] for row in data])):
        labels = [
            [name for name, each in zip(names, row, strict=True) if each > 0.5] for row in scores
        ]
        assert labels == [line["prediction"] for line in lines]
    chances = np.array([line["probabilities"] for line in lines])
    assert not np.array_equal(chances > 0.5, chances > thresholds)
    # the weights are in the dtype of the source, but for the changed layer
    before, after = (load_file(each / "model.safetensors") for each in (model, folder))
    changed = {key for key in before if not torch.equal(before[key].float(), after[key].float())}
    assert before.keys() == after.keys()
    assert changed == {"classifier.weight", "classifier.bias"}
    assert {str(after[key].dtype) for key in after.keys() - changed} == {"torch.bfloat16"}


def test_an_export_of_the_export(exported: Any, tmp_path: Path) -> None:
    """There is nothing left to change: the temperature is not applied twice."""
    says = ["no temperature and no threshold", "as it is"]
    refusal(export, options(exported["two"][0], tmp_path / "out"), says=says)


@pytest.mark.parametrize(
    "name", slow_but(ARCHITECTURES, "RoBERTa", "ModernBERT", "BigBird", "Qwen3")
)
def test_the_layer_of_every_architecture(name: str, tmp_path: Path) -> None:
    """logits / temperature - offsets, in float32."""
    texts = [text for (text,) in texts_of("seven")]
    folder = make_architecture(name, tmp_path / "base", texts)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, problem_type="multi_label_classification"
    )
    model.config.pad_token_id = AutoTokenizer.from_pretrained(folder).pad_token_id
    model.save_pretrained(folder)
    chances, names = np.array([0.3, 0.5, 0.9]), list(model.config.id2label.values())
    content = {
        "labels": names,
        "temperature": 1.7,
        "thresholds": dict(zip(names, chances, strict=True)),
    }
    (folder / "decisions.json").write_text(json.dumps(content))
    out = tmp_path / "out"
    if name == "BigBird":
        refusal(export, options(folder, out), says=["block-sparse", "toolkit predict"])
        return
    if name.startswith("Qwen3"):
        refusal(export, options(folder, out), says=["has no bias"])
        edit_json(folder / "decisions.json", thresholds={})
        chances = np.array([0.5, 0.5, 0.5])
    export(options(folder, out))
    inputs = AutoTokenizer.from_pretrained(folder)(texts[:4], truncation=True, max_length=40, padding=True,
                                                   return_tensors="pt")  # fmt: skip
    with torch.no_grad():
        before, after = (
            AutoModelForSequenceClassification.from_pretrained(each).eval()(**inputs).logits.numpy()
            for each in (folder, out)
        )
    expected = before / 1.7 - np.log(chances / (1 - chances))
    np.testing.assert_allclose(after, expected, rtol=0, atol=5e-7)
    assert read(out)["architectures"] == read(folder)["architectures"]


def test_what_is_refused(tmp_path: Path) -> None:
    model, out = run_of("two") / "model", tmp_path / "out"
    refusal(export, options(run_of("number") / "model", out), says=["no threshold", "as it is"])
    refusal(export, options(model, out, int8=True), says=["--int8"])
    words = shutil.copytree(model, tmp_path / "words")
    words_first(AutoTokenizer.from_pretrained(model)).save_pretrained(words)
    refusal(export, options(words, out), says=["tokenizer.json", "toolkit predict"])
    ends = shutil.copytree(model, tmp_path / "ends")
    edit_json(ends / "tokenizer_config.json", head_tokens=8)
    refusal(export, options(ends, out), says=["head_tokens", "toolkit predict"])
    # which transformers does not read
    capitals = shutil.copytree(model, tmp_path / "capitals")
    edit_json(capitals / "tokenizer.json", normalizer=None)
    refusal(export, options(capitals, out), says=["tokenizer.json", "toolkit predict"])
    other = shutil.copytree(model, tmp_path / "other")
    sizes = {
        "vocab_size": 127,
        "d_model": 12,
        "n_head": 2,
        "d_head": 6,
        "d_inner": 12,
        "block_sizes": [1],
    }
    config = FunnelConfig(**sizes, id2label={0: "neg", 1: "pos"}, num_labels=2)
    FunnelForSequenceClassification(config).save_pretrained(other)
    refusal(export, options(other, out), says=["FunnelForSequenceClassification", "decisions.json"])
    assert not out.exists()


def test_a_folder_of_an_older_version(tmp_path: Path) -> None:
    folder = shutil.copytree(run_of("two") / "model", tmp_path / "model")
    (folder / FILE).unlink()
    export(options(folder, tmp_path / "out"))
    assert tei_length(tmp_path / "out") == 24


LOAD_BY_PEFT = """
import json, sys
from peft import PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification as Classifier, AutoTokenizer
import torch

answers = []
for job in json.loads(sys.argv[1]):
    config = AutoConfig.from_pretrained(job["model"])
    base = Classifier.from_pretrained(job["base"], config=config)
    model = PeftModel.from_pretrained(base, job["adapter"]).eval()
    encoded = AutoTokenizer.from_pretrained(job["model"])(*job["texts"], return_tensors="pt")
    with torch.no_grad():
        answers.append(model(**encoded).logits[0].tolist())
print(json.dumps(answers))
assert "toolkit" not in sys.modules
"""


def test_peft_alone_loads_the_trained_head() -> None:
    """In a new process, of 1, 2 and 7 outputs and of pairs, on a base as docs/serving.md makes it: to the logits of
    model/. Under ZeRO-3 and others: tests/test_sameness.py."""
    folders = {"number": run_of("number"), "two": runs("single")["lora best step"],
               "seven": run_of("seven"), "pairs": run_of("pairs")}  # fmt: skip
    jobs, expected = [], []
    for name, run in folders.items():
        texts = ["a fine film", "dull, and the price is bad"][: 1 + (name == "pairs")]
        model = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
        with torch.no_grad():
            encoded = AutoTokenizer.from_pretrained(run / "model")(*texts, return_tensors="pt")
            expected.append(model(**encoded).logits[0].tolist())
        base = json.loads((run / "config.json").read_text())["settings"]["model_name_or_path"]
        jobs.append(
            {"base": base, "adapter": run / "adapter", "model": run / "model", "texts": texts}
        )
    command = [sys.executable, "-P", "-c", LOAD_BY_PEFT, json.dumps(jobs, default=str)]
    env = {**environment(), "PYTHONPATH": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    assert [len(logits) for logits in answers] == [1, 2, 7, 2]
    for mine, theirs in zip(answers, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def vllm_faults(adapter: Path) -> set[str]:
    """What vLLM refuses in an adapter: modules that it cannot train fully, features, tensors."""
    config = read(adapter, "adapter_config.json")
    faults = set(config["modules_to_save"]) - {"classifier", "score"}
    faults |= {name for name in ("use_dora", "lora_bias", "layer_replication") if config[name]}
    if config["bias"] != "none":
        faults.add("bias")
    for name in load_file(adapter / "adapter_model.safetensors"):
        module = name.split(".")[-2]
        if module not in ("lora_A", "lora_B", "classifier", "score"):
            faults.add(name.removeprefix("base_model.model."))
    return faults


def test_adapters_by_the_rules_of_vllm() -> None:
    for run in (runs("single")["lora best step"], *map(run_of, ("seven", "number", "pairs"))):
        assert vllm_faults(run / "adapter") == set()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Qwen3", ""),
        ("BERT", "bert.pooler"),
        ("RoBERTa", "classifier.dense.weight"),
        ("ModernBERT", "head"),
        ("DistilBERT", "pre_classifier"),
    ],
)
def test_other_adapters_by_the_rules_of_vllm(name: str, fault: str, tmp_path: Path) -> None:
    """It takes one linear layer as the head; this BERT has had no pooler, and trains one."""
    base = make_architecture(name, tmp_path / "base", [text for (text,) in texts_of("seven")])
    settings = ModelSettings(model_name_or_path=str(base), lora_r=2)
    model = load_classifier(settings, Labels("single_label_classification", ("a", "b"), ()), seed=1)
    save_model(Accelerator(cpu=True), model, None, tmp_path / "run" / "model")
    faults = vllm_faults(tmp_path / "run" / "adapter")
    assert fault in faults if fault else not faults


class Server(http.server.BaseHTTPRequestHandler):
    """Both servers, for the folder `model` of the current one."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/predict":
            reply: Any = tei(Path("model"), **body)
        else:
            assert self.path == "/classify"
            reply = {"data": vllm(Path("model"), **body)}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["two", "several"])
@pytest.mark.parametrize("kind", ["tei", "vllm"])
def test_the_docs_client(kind: str, name: str, port: int, tmp_path: Path, monkeypatch: Any) -> None:
    """With decisions.json at the client, model/ itself is served; abstaining works, too."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    script, diff = (page.split(f"```{each}\n")[1].split("```")[0] for each in ("python", "diff"))
    if kind == "vllm":
        for old, new in re.findall(r"^-(.+)\n\+(.+)\n", diff, re.MULTILINE):
            assert script.count(old) == 1
            script = script.replace(old, new)
    script, count = re.subn(r"(?<=127\.0\.0\.1:)\d+", str(port), script)
    assert count == 1
    script, count = re.subn("runs/cls/model", "model", script)
    assert count == 1
    Path("model").symlink_to(run_of(name) / "model")
    Path("client.py").write_text(script, encoding="utf-8")
    names = runpy.run_path("client.py")
    texts = [text for (text,) in texts_of(name)]
    answers = [names["answer"](logits) for logits in names["logits_of"](texts)]
    assert answers == [
        line["prediction"] for line in toolkit.predict("model", texts, mixed_precision="no")
    ]
