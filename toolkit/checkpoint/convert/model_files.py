"""Copies the config, tokenizer and label names, and checks that the weights fit the config."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.lora import ADAPTER_CONFIG, HEADS
from toolkit.checkpoint.tensor_index import DTYPES
from toolkit.errors import Faults, UserError, listing
from toolkit.utils.files import check_model_config, read_table, refuse_link_out, write_new

CONFIG = "config.json"
DECISIONS = "decisions.json"
"""Thresholds and temperature of the model; they belong to the weights of one step."""
# The files to copy from a model folder.
_COPIED = (
    "generation_config.json", "*token*.json", "vocab*", "merges.txt", "*.model", "spm*", "*.vocab", "*.py",
    "chat_template*", "*preprocessor_config.json", "processor_config.json", "*labels*", DECISIONS,
    "config_sentence_transformers.json", "sentence_*_config.json", "modules.json",
    *(f"[0-9]_[A-Z]*/{name}" for name in ("config.json", "model.safetensors", "pytorch_model.bin")),  # 1_Pooling, say
)  # fmt: skip

# Model types whose layers all have the same parameters -> transformers' attribute for the encoder below a head.
_KNOWN = {"xlm-roberta": "roberta", "camembert": "roberta", "big_bird": "bert"} | {
    name: name for name in ("bert", "roberta", "electra", "ernie", "nezha", "distilbert")
}
MODULE_ATTRIBUTES = ("model.", "net.")
"""Common attributes of a user's module for the model in it."""
_BUILD_SECONDS = 300  # for transformers to build a model on the meta device
_LAYER = re.compile(r"\blayer\.(\d+)\.")
_WORDS = "embeddings.word_embeddings.weight"
_WITH_LABELS = ("ForSequenceClassification", "ForTokenClassification")


def copied_files(
    folder: Path | None, is_adapter: bool, dtype: str, classes: int | None = None
) -> tuple[dict[str, Any] | None, dict[str, Path | str]]:
    """(the model's config, None for an adapter; name -> a file to copy, or a text to write).

    `dtype`: written into the config. `classes`: of a classifier; a config of a language model gets its class. Raises
    UserError when the folder has no valid config of a model.
    """
    if folder is None:
        return None, {}
    paths = {path for pattern in _COPIED for path in folder.glob(pattern) if not path.is_dir()}
    files: dict[str, Path | str] = {path.relative_to(folder).as_posix(): path for path in sorted(paths)}
    for name in (*files, CONFIG, ADAPTER_CONFIG):
        refuse_link_out(folder / name, folder)
    if is_adapter:
        return None, {ADAPTER_CONFIG: folder / ADAPTER_CONFIG, **files}
    config, name = _read_config(folder), DTYPES[dtype][1]
    without_head = r"(\w+?)(LMHeadModel|Model|ForMaskedLM|ForCausalLM|ForPreTraining)"
    if classes and (kind := re.fullmatch(without_head, (config.get("architectures") or [""])[0])):
        config["architectures"] = [f"{kind[1]}ForSequenceClassification"]
        if len(config.get("id2label") or ()) != classes:  # else a run named its classes there
            labels = {str(number): f"LABEL_{number}" for number in range(classes)}  # as transformers names them
            config |= {"id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}}
    written = {**config, "dtype": name} | ({"torch_dtype": name} if "torch_dtype" in config else {})
    return config, {CONFIG: json.dumps(written, ensure_ascii=False, indent=2) + "\n", **files}


def decisions_of_run(model_folder: Path | None, step: int | None) -> dict[str, Path | str]:
    """The decisions.json of a run's model, if it is of the checkpoint's step."""
    parents = model_folder.resolve().parents if model_folder else ()  # RUN/checkpoints/STEP/model
    path = parents[2] / "model" / DECISIONS if len(parents) > 2 and parents[1].name == "checkpoints" else None
    if path is None or not path.is_file() or read_table(path, {}).get("step") != step:
        return {}
    refuse_link_out(path, path.parent)
    return {DECISIONS: path}


def write_files(folder: Path, files: Mapping[str, Path | str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            write_new(folder / name, content)
        else:
            shutil.copyfile(content, folder / name)


def _read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json. Raises UserError when there is none, or it is of something else."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder} has no {CONFIG}: name a model's folder with --config_from")
    check_model_config(config := read_table(path, {}), path)
    if not ("model_type" in config or "architectures" in config):
        inner = folder / "model"
        hint = f"; did you mean {inner}?" if (inner / CONFIG).is_file() else ""
        raise UserError(f"{path} is not the config of a model: it has no model_type{hint}")
    return config


def is_known_type(folder: Path) -> bool:
    """Whether the config is of a model type whose parameters' names do not begin with `model.`."""
    return _read_config(folder).get("model_type") in _KNOWN


def check_config(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], path: Path, where: str) -> None:
    """Raises UserError naming weights that are missing, or of another shape, as far as the config determines it.

    `shapes`: by parameter name; `path`: the config's; `where`: the checkpoint, for the message.
    """
    faults = Faults()
    family, classes = str(config.get("model_type")), config.get("architectures") or ()
    if family in _KNOWN:
        parents = [name.removesuffix(_WORDS) for name in shapes if name.endswith(_WORDS)]
        prefixes = sorted({parent.removesuffix(f"{_KNOWN[family]}.") for parent in parents} - {""})
        # of a module around the model, as torch's AveragedModel; a user's class may give its encoder any name
        of_transformers = re.compile(f"(?i){re.sub('[-_]', '', family)}(Model|For\\w+)")
        if prefixes and all(map(of_transformers.fullmatch, classes)):
            fault = f"{where} has {prefixes[0]}*, which no {family} has"
            raise UserError(f"{fault}; to convert only those: --prefix {prefixes[0].removesuffix('.')}")
        if not parents:
            faults.add(f"{where} lacks {_WORDS}, which {path} requires")
        key = "n_layers" if family == "distilbert" else "num_hidden_layers"
        layers = sorted({int(match[1]) for name in shapes if (match := _LAYER.search(name))})
        if (count := config.get(key)) is not None and layers != list(range(count)):
            faults.add(f"{where} has the layers {listing(layers) or 'none'}, and {path} has {key} = {count}")
    if any(str(kind).endswith(_WITH_LABELS) for kind in classes):
        labels = config.get("id2label")
        count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
        for head in (name for name in HEADS if name in shapes and count is not None):
            if shapes[head][:1] != (count,):
                faults.add(f"{where} has {head} of shape {list(shapes[head])}, and {path} has {count} labels")
        if family in _KNOWN and not any(name in shapes for name in HEADS):
            faults.add(f"{where} lacks classifier.weight, which {path} requires")
    faults.raise_if_any()


def verify_names(folder: Path, shapes: Mapping[str, tuple[int, ...]], tied: Collection[str]) -> str:
    """Compares names and shapes with the model that transformers builds from the folder's config on the meta device.

    In a separate process, for its memory. Returns a line for the user; where no model could be built, with the reason.
    Raises UserError naming the differences.
    """
    command = [sys.executable, "-P", "-c", _BUILD, str(folder)]  # -P: imports nothing from the current folder
    try:
        built = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=True
        )
    except subprocess.SubprocessError as error:
        message = (error.stderr if isinstance(error, subprocess.CalledProcessError) else "").strip() or str(error)
        return f"not compared with the model's class: {message.splitlines()[-1][-200:]}"
    model = json.loads(built.stdout.strip().split("\n")[-1])
    expected = {name: tuple(shape) for name, shape in model["shapes"].items()}
    # constants that older versions of transformers saved, and from_pretrained ignores
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith("position_ids") or name in expected}
    differences = {
        "lacks": [name for name in expected if name not in {*shapes, *model["tied"], *tied}],
        "has in addition": [name for name in shapes if name not in expected],
        "has in another shape": [name for name, shape in shapes.items() if expected.get(name, shape) != shape],
    }
    faults = [f"{what} {listing(names, 5)}" for what, names in differences.items() if names]
    if faults:
        raise UserError(f"compared with {model['class']} of its {CONFIG}, the output {'; '.join(faults)}")
    return f"verified: the {len(expected)} names and shapes are those of {model['class']}"


_BUILD = """
import collections, json, os, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (16 << 30,) * 2)
os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
import torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=False)
name = config.architectures[0]
kind = getattr(transformers, name)
with torch.device("meta"):
    state = kind(config).state_dict(keep_vars=True)
shapes = {name: list(tensor.shape) for name, tensor in state.items()}
names = collections.Counter(map(id, state.values()))
tied = [name for name, tensor in state.items() if names[id(tensor)] > 1]
print(json.dumps({"class": kind.__name__, "shapes": shapes, "tied": tied}))
"""
