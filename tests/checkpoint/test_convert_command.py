"""`toolkit convert`: its errors, time and memory, and what it leaves when it is interrupted."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.conftest import Made
from tests.checkpoint.handmade import assert_same, read_folder, write_run
from tests.checkpoint.test_convert import bert_config, convert
from tests.checkpoint.test_folder import names_in
from tests.faults import Fault, refusal
from tests.runs import edit_json, start
from toolkit import cli
from toolkit.checkpoint.convert import conversion, transfer

TENSORS = {"a.weight": torch.randn(5, 7), "b.bias": torch.randn(11)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", TENSORS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "none", "out"], "none does not exist"),
        (["convert", "run"], "the folder to create"),
        (["convert", "run", "out", "--json"], "--inspect [--json] CHECKPOINT"),
        (["convert", "run", "out", "--dtype", "int8"], "invalid choice"),
        (["convert", "run", "out", "--config_from", "run"], "run has no config.json"),
        (["convert", "run", "out", "--base_model", "nowhere"], "nowhere does not exist"),
        (["convert", "run", "run"], "contains the input run"),
        (["convert", "run", "."], "is not a name for a new folder"),
        (["convert", "run", "out", "--max_shard_size", "5"], "did you mean 5GB?"),
        (["convertt", "run"], "did you mean convert"),
    ],
)
@pytest.mark.usefixtures("run")
def test_a_mistake_is_one_line(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["toolkit", *words, *(["--overwrite"] if words[-1] == "." else [])])
    refusal(cli._run, cli.commands(), says=[message])
    assert names_in(tmp_path) == ["run"]


def test_no_torch_and_little_memory(tmp_path: Path) -> None:
    tensors = {"large": torch.randn(32_000_001), **{f"small.{number}": torch.randn(4_001) for number in range(2000)}}
    run = write_run(tmp_path / "run", tensors)
    program = (
        "import resource, sys\nsys.argv = ['toolkit', *sys.argv[1:]]\nfrom toolkit.cli import main\nmain()\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "print(peak, sorted({'torch', 'deepspeed', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    for dtype, most in (("fp32", 40), ("bf16", 64)):
        # started by a shell: the peak of a fork of this process would include this process's memory
        words = [sys.executable, "-c", program, "convert", str(run), str(tmp_path / dtype), "--dtype", dtype]
        done = subprocess.run(["sh", "-c", '"$@"; true', "sh", *words], capture_output=True, text=True, check=True)
        peak, heavy = done.stdout.splitlines()[-1].split(" ", 1)
        assert heavy == "[]"
        assert int(peak) < most, done.stdout


def test_overwrite_replaces_and_nothing_else_does(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(run, out)
    for name in ("mine.txt", "model-v1/config.json"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
        refusal(convert, run, out, match=r"already exists: .*--overwrite")
        refusal(convert, run, out, overwrite=True, match=f"contains {name}, which no conversion writes")
        (out / name).unlink()
    convert(run, out, overwrite=True, dtype="bf16")
    assert names_in(out) == ["model.safetensors"]
    assert read_folder(out)["b.bias"].dtype == torch.bfloat16
    assert names_in(tmp_path) == ["out", "run"]
    (tmp_path / "empty").mkdir()
    convert(run, tmp_path / "empty", overwrite=True)
    checkpoint = write_run(tmp_path / "step-00000007", TENSORS)
    (tmp_path / "best").symlink_to(checkpoint)
    refusal(convert, run, checkpoint, overwrite=True, match=r"contains manifest.json, ")
    for folder in (checkpoint, tmp_path / "best"):
        refusal(convert, run, folder / "out", match="is in the checkpoint")
    refusal(convert, tmp_path / "nosuch", checkpoint / "out", match="nosuch does not exist")
    (tmp_path / "file").write_text("x")
    refusal(convert, run, tmp_path / "file", overwrite=True, match="to replace a folder")


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_that_appeared_meanwhile_is_left_alone(
    overwrite: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    out, real = tmp_path / "out", conversion.write_shards

    def write_shards(folder: Path, *arguments: Any) -> int:
        out.mkdir()
        (out / "thesis.txt").touch()
        return real(folder, *arguments)

    monkeypatch.setattr(conversion, "write_shards", write_shards)
    message = refusal(convert, run, out, overwrite=overwrite, match="thesis.txt" if overwrite else "not empty")
    assert (names_in(out), names_in(tmp_path)) == (["thesis.txt"], ["out", "run"])
    fault(f"OUT appears while convert writes (--overwrite {overwrite})", message)


@pytest.mark.parametrize("name", ["model/vocab.txt", "model/config.json", "weights.safetensors", "model"])
def test_a_link_out_of_the_folder_is_refused(name: str, run: Path, tmp_path: Path, fault: Fault) -> None:
    elsewhere = tmp_path / "elsewhere"
    (run / "model" / "config.json").write_text('{"model_type": "new"}')
    (run / "model" / "vocab.txt").touch()
    (run / name).rename(elsewhere)
    (run / name).symlink_to(elsewhere)
    message = refusal(convert, run, tmp_path / "out", match=f"{run / name} is a link to {elsewhere}, outside")
    assert not (tmp_path / "out").exists()
    fault(f"a link out of the checkpoint ({name})", message)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused(name: str, tmp_path: Path, fault: Fault) -> None:
    (model := tmp_path / "model").mkdir()
    save_file(TENSORS, model / "model.safetensors")
    (model / "config.json").write_text('{"model_type": "new"}')
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    message = refusal(convert, model, tmp_path / "out", says=[str(model / name)])
    assert not (tmp_path / "out").exists()
    fault(f"convert of a folder whose {name} is a pipe", message)


def test_verify_executes_nothing_of_the_folder(run: Path, tmp_path: Path) -> None:
    """Even if the user confirms."""
    config = {"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (run / "model" / "config.json").write_text(json.dumps(config))
    (run / "model" / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass OwnConfig: pass\n")
    words = [sys.executable, "-m", "toolkit", "convert", str(run), str(tmp_path / "out"), "--verify"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        message, _ = process.communicate("y\n" * 100)
    assert "not compared with the model's class" in message
    assert names_in(tmp_path) == ["out", "run"]


def test_a_failure_keeps_the_old_one(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    out = tmp_path / "out"
    convert(run, out)
    before = (out / "model.safetensors").read_bytes()
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if ".draft-" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    message = refusal(convert, run, out, overwrite=True, dtype="bf16", match="Input/output error; nothing was left")
    assert (out / "model.safetensors").read_bytes() == before
    assert names_in(tmp_path) == ["out", "run"]
    fault("a disk that fails while convert replaces OUT", message, "nothing: OUT is the old one")


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for function in ("pwrite", "ftruncate", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, function, full)
            message = r"cannot write .*out: No space left on device; nothing was left"
            refusal(convert, run, tmp_path / "deep" / "out", sync=True, match=message)
        assert names_in(tmp_path) == ["run"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(number: int, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": torch.randn(1_500_000)})
    slow = (
        "import os, time\nreal = os.pwrite\ndef pwrite(*a):\n    time.sleep(0.2)\n"
        "    return real(*a)\nos.pwrite = pwrite\n"
        "import sys\nsys.argv = ['toolkit', *sys.argv[1:]]\nfrom toolkit.cli import main\nmain()"
    )
    words = [sys.executable, "-c", slow, "convert", str(run), str(tmp_path / "out")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while not any(tmp_path.glob(".out.draft-*/model.safetensors")):
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.3)
        process.send_signal(number)
        assert process.stderr.read() == "interrupted\n"
    assert (process.returncode, names_in(tmp_path)) == (130, ["run"])


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["zero1-bert x2", "zero3-subgroups x2"])
def test_inspect_imports_nothing_heavy(name: str, made: Made) -> None:
    done = start([sys.executable, "-X", "importtime", "-m", "toolkit", "convert", "--inspect", made.folder]).succeeded()
    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
    assert "toolkit.checkpoint.convert.conversion" in imported
    assert not {"torch", "transformers", "deepspeed", "numpy"} & imported
    assert f"world           {made.world}\n" in done.out
    message = json.loads(start(["toolkit", "convert", "--inspect", "--json", made.folder]).out)
    assert message["step"] == 2
    assert message["shapes"]
    assert message["model_folder"] is None


@pytest.mark.usefixtures("built_in_a_fork")
@pytest.mark.parametrize("stored", ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"])
def test_tied_weights_are_written_once_and_tied_again(stored: str, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(1)
    model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(tiny_model))
    state = dict(model.state_dict())
    pair = {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"}
    (omitted,) = pair - {stored}
    tied = {omitted: stored, "cls.predictions.decoder.bias": "cls.predictions.bias"}
    run = write_run(tmp_path / "run", {key: tensor for key, tensor in state.items() if key not in tied}, tied=tied)
    config = bert_config(tiny_model, tmp_path / "config")
    edit_json(config / "config.json", architectures=["BertForMaskedLM"])
    message = convert(run, tmp_path / "out", config_from=config, verify=stored.startswith("bert"))
    assert not stored.startswith("bert") or "BertForMaskedLM" in message[1]
    assert all(words in message[-1] for words in ("left out: ", f" {omitted} (tied to {stored})", "--keep_tied"))
    assert "left out" not in "".join(convert(run, tmp_path / "both", config_from=config, keep_tied=True))
    assert_same(read_folder(tmp_path / "both"), state)
    again, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert_same(dict(again.state_dict()), state)


def test_threads_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BLOCK", 1 << 10)
    monkeypatch.setattr(transfer, "CHUNK", 4 << 10)
    tensors = {f"x.{number}": torch.randn(number * 977 + 1) for number in range(9)}
    run = write_run(tmp_path / "run", tensors)
    for threads in (1, 3, 8):
        monkeypatch.setattr(transfer, "MAX_THREADS", threads)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, threads=threads: range(threads))
        convert(run, tmp_path / f"out{threads}", verify=True)
        assert_same(read_folder(tmp_path / f"out{threads}"), tensors)
