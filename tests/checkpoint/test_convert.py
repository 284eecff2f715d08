"""`toolkit convert` of real checkpoints of every kind is what was in memory, bit for bit."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint.conftest import Made
from tests.checkpoint.handmade import assert_same, read_folder
from tests.checkpoint.test_open_folders import read_reference
from tests.faults import refusal
from tests.runs import edit_json
from toolkit.checkpoint.convert import conversion
from toolkit.checkpoint.convert.conversion import ConvertSettings
from toolkit.checkpoint.read.open import open_checkpoint

pytestmark = pytest.mark.multiprocess


def convert(checkpoint: Path, out: Path, **options: object) -> list[str]:
    return conversion.convert(ConvertSettings(checkpoint, out, **options))  # type: ignore[arg-type]


def expected_of(made: Made) -> dict[str, torch.Tensor]:
    """Parameters and buffers, by name; floating ones in fp32."""
    actual = {}
    for key, tensor in read_reference(made).items():
        kind, _, name = key.partition(".")
        if kind in ("weight", "buffer"):
            actual[name] = tensor.float() if tensor.is_floating_point() else tensor
    return actual


@pytest.mark.parametrize(
    "name",
    ["zero0 x1", "zero1-bf16-optimizer x3", "zero2-aligned x2", "zero2-round-robin x2", "zero2-elastic x2",
     "zero3-frozen x2", "zero3-groups x2", "zero3-subgroups x2"],
)  # fmt: skip
def test_the_output_is_what_was_in_memory(made: Made, tmp_path: Path) -> None:
    message = convert(made.folder, tmp_path / "out", verify=True)
    assert_same(read_folder(tmp_path / "out"), expected_of(made))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert "--config_from" in message[0]
    assert "bit for bit" in message[1]


def bert_config(model: Path, folder: Path, labels: int = 3) -> Path:
    """A folder with the config of the checkpoints' BERT and its tokenizer."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    kinds = {str(number): f"label {number}" for number in range(labels)}
    edit_json(folder / "config.json", architectures=["BertForSequenceClassification"], id2label=kinds,
              label2id={label: int(number) for number, label in kinds.items()})  # fmt: skip
    return folder


@pytest.mark.parametrize(("name", "most"), [("zero2-bert x2", "5GB"), ("zero3-bert x2", "20KB")])
def test_from_pretrained_loads_it(made: Made, most: str, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from toolkit.commands.convert import parse_size

    config = bert_config(tiny_model, tmp_path / "config")
    out = tmp_path / "out"
    message = convert(made.folder, out, config_from=config, max_shard_bytes=parse_size(most), verify=most == "5GB")
    assert most != "5GB" or any("those of BertForSequenceClassification" in line for line in message), message
    model, report = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    state, wanted = model.state_dict(), expected_of(made)
    assert_same({key: state[key] for key in wanted}, wanted)
    assert model.config.id2label[2] == "label 2"
    assert AutoTokenizer.from_pretrained(out)("good film")["input_ids"]
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert (out / "model.safetensors.index.json").is_file() == (len(shards) > 1) == (most == "20KB")


@pytest.mark.usefixtures("built_in_a_fork")
def test_verify_builds_the_model(deepspeed_checkpoints: dict[str, Made], tiny_model: Path, tmp_path: Path) -> None:
    """What no rule of ours sees: another width inside the layers. Neither this nor a dry run writes anything."""
    config = bert_config(tiny_model, tmp_path / "config")
    edit_json(config / "config.json", intermediate_size=4)
    message = r"BertForSequenceClassification.*in another shape bert.encoder.layer.0"
    folder = deepspeed_checkpoints["zero2-bert x2"].folder
    refusal(convert, folder, tmp_path / "out", config_from=config, verify=True, match=message)
    text = "\n".join(convert(folder, tmp_path / "out", config_from=config, dry_run=True))
    assert all(name in text for name in ("model.safetensors", "config.json", "vocab.txt"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["zero1-bf16 x2", "zero3-frozen x2", "zero0 x1"])
def test_a_flipped_bit_is_found_and_named(made: Made, tmp_path: Path) -> None:
    copy = shutil.copytree(made.folder, tmp_path / "saved")
    spans = [span for stored in open_checkpoint(copy).weights.values() for span in stored.spans]
    members = {span.member for span in spans if span.member.size}
    assert len(members) > 1
    for member in members:
        for place in {0, member.size // 2, member.size - 1}:
            flip(member.file, member.offset + place)
            refusal(convert, copy, tmp_path / "out", says=["damaged", str(member.file), member.name])
            flip(member.file, member.offset + place)
            assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    convert(copy, tmp_path / "out")


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 0x10
    file.write_bytes(content)
