"""What stands beside the weights (config, tokenizer, label names), and whether the weights are those of the config."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.lora import ADAPTER_CONFIG
from toolkit.errors import Faults, UserError, listing
from toolkit.utils.files import create_file, read_table, refuse_link_out
from toolkit.utils.model_config import check_model_config

CONFIG = "config.json"
DECISIONS = "decisions.json"
"""How the probabilities of a model become answers; it belongs to the weights of one step."""
_TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# What a model folder may hold that is no weight; other files (logs, optimizer states) stay behind.
_KEPT = (
    "generation_config.json", "*token*.json", "vocab*", "merges.txt", "*.model", "spm*", "*.vocab", "*.py",
    "chat_template*", "*preprocessor_config.json", "processor_config.json", "*labels*", DECISIONS,
    "config_sentence_transformers.json", "sentence_bert_config.json", "modules.json",
)  # fmt: skip

# Models of one kind of layer, each with the same parameters.
_KNOWN = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "big_bird", "ernie", "nezha", "distilbert")
OTHERS_ATTRIBUTES = ("model.", "net.")
"""What one's own module calls the model in it."""
_SECONDS = 300  # for transformers to build a model without its weights
_LAYER = re.compile(r"\blayer\.(\d+)\.")
_ROWS = {
    "embeddings.word_embeddings.weight": "vocab_size",
    "embeddings.position_embeddings.weight": "max_position_embeddings",
    "embeddings.token_type_embeddings.weight": "type_vocab_size",
}
_HEADS = ("classifier.weight", "classifier.out_proj.weight")
_WITH_LABELS = ("ForSequenceClassification", "ForTokenClassification")


def files_beside(
    folder: Path | None, is_adapter: bool, dtype: str, classes: int | None = None
) -> tuple[dict[str, Any] | None, dict[str, Path | str]]:
    """(the model's config; name -> a file to copy, or a text to write). An adapter has no config of the model.

    `dtype`: of the weights, so that `from_pretrained` gives the model in it. `classes`: of the classifier that an
    adapter made of the config's language model. Raises UserError when the folder has no config of a model that could
    be read.
    """
    if folder is None:
        return None, {}
    found = {path for pattern in _KEPT for path in folder.glob(pattern) if not path.is_dir()}
    copied = {path.name: path for path in sorted(found) if not path.name.endswith(".index.json")}
    for path in (*copied.values(), folder / CONFIG, folder / ADAPTER_CONFIG):
        refuse_link_out(path, folder)
    if is_adapter:
        return None, {ADAPTER_CONFIG: folder / ADAPTER_CONFIG, **copied}
    config, name = _read_config(folder), _TORCH_NAMES[dtype]
    kind = re.fullmatch(r"(\w+?)(Model|For\w+)", (config.get("architectures") or [""])[0])
    if classes and kind and kind[2] != "ForSequenceClassification":
        labels = [f"LABEL_{number}" for number in range(classes)]  # as transformers names them
        config |= {
            "architectures": [f"{kind[1]}ForSequenceClassification"],
            "id2label": {str(number): label for number, label in enumerate(labels)},
            "label2id": {label: number for number, label in enumerate(labels)},
        }
    changed = {**config, "dtype": name} | ({"torch_dtype": name} if "torch_dtype" in config else {})
    return config, {CONFIG: json.dumps(changed, ensure_ascii=False, indent=2) + "\n", **copied}


def decisions_of_run(model_folder: Path | None, step: int | None) -> dict[str, Path | str]:
    """The thresholds and the temperature of a run's model, where the checkpoint with `model_folder` has its weights."""
    parents = model_folder.resolve().parents if model_folder else ()  # RUN/checkpoints/STEP/model
    path = parents[2] / "model" / DECISIONS if len(parents) > 2 and parents[1].name == "checkpoints" else None
    if path is None or not path.is_file() or read_table(path, {}).get("step") != step:
        return {}
    refuse_link_out(path, path.parent)
    return {DECISIONS: path}


def write_files(folder: Path, files: Mapping[str, Path | str]) -> None:
    for name, content in files.items():
        with create_file(folder / name) as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file)


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


def is_known(folder: Path) -> bool:
    """Whether the config is of a kind whose parameters' names are known to begin otherwise than with `model.`."""
    return _read_config(folder).get("model_type") in _KNOWN


def check_config(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], path: Path, where: str) -> None:
    """Raises UserError naming what the weights lack or have left over, as far as the config tells.

    `shapes`: by the model's names; `path`: the config's; `where`: the checkpoint, for the message.
    """
    faults = Faults()
    rows, heads = {}, {}
    family = str(config.get("model_type"))
    if family in _KNOWN:
        key = "n_layers" if family == "distilbert" else "num_hidden_layers"
        found = sorted({int(match[1]) for name in shapes if (match := _LAYER.search(name))})
        if (count := config.get(key)) is not None and found != list(range(count)):
            faults.add(f"{where} holds the layers {listing(found) or 'none'}, and {path} has {key} = {count}")
        rows = {end: (config.get(key), f"{key} = {config.get(key)}") for end, key in _ROWS.items()}
    if any(str(kind).endswith(_WITH_LABELS) for kind in config.get("architectures") or ()):
        labels = config.get("id2label")
        count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
        heads = dict.fromkeys(_HEADS, (count, f"{count} labels"))
    for end, (wanted, said) in {**rows, **heads}.items():
        for name, shape in shapes.items():
            if (name == end or (end in rows and name.endswith(end))) and wanted is not None and shape[:1] != (wanted,):
                faults.add(f"{where} has {name} of shape {list(shape)}, and {path} has {said}")
    if rows and not any(name.endswith("word_embeddings.weight") for name in shapes):
        faults.add(f"{where} lacks embeddings.word_embeddings.weight, which {path} asks for")
    if rows and heads and not any(head in shapes for head in _HEADS):
        nested = next((name.removesuffix(head) for name in shapes for head in _HEADS if name.endswith(f".{head}")), "")
        hint = f"; those under {nested} alone: --prefix {nested}" if nested else ""
        faults.add(f"{where} lacks classifier.weight, which {config['architectures'][0]} of {path} has{hint}")
    elif rows and (others := sorted(name for name in shapes if name.startswith(OTHERS_ATTRIBUTES))):
        prefix = others[0].partition(".")[0]
        faults.add(f"{where} has {others[0]}, which no {family} of {path} has; those alone: --prefix {prefix}")
    faults.raise_if_any()


def verify_names(folder: Path, shapes: Mapping[str, tuple[int, ...]], tied: Collection[str]) -> str:
    """Compares with the model that transformers builds of the folder's config, without its weights.

    It runs in a process of its own, so that this one stays small. Returns what was done, or why it could
    not be. Raises UserError naming what is missing or left over.
    """
    command = [sys.executable, "-P", "-c", _BUILD, str(folder)]  # -P: not with what stands in the current folder
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except subprocess.SubprocessError as error:
        said = isinstance(error, subprocess.CalledProcessError) and error.stderr.strip()
        return f"not compared with the model's class: {(said or str(error)).splitlines()[-1][-200:]}"
    built = json.loads(done.stdout.strip().split("\n")[-1])
    expected = {name: tuple(shape) for name, shape in built["shapes"].items()}
    others = {*built["tied"], *tied}
    missing = [name for name in expected if name not in shapes and name not in others]
    over = [name for name in shapes if name not in expected]
    wrong = [name for name, shape in shapes.items() if expected.get(name, shape) != shape]
    parts = [("lacks", missing), ("has left over", over), ("has in another shape", wrong)]
    faults = [f"{what} {listing(names, 5)}" for what, names in parts if names]
    if faults:
        raise UserError(f"against {built['class']}, which its {CONFIG} names, the output {'; '.join(faults)}")
    return f"verified: the {len(expected)} names and shapes are those of {built['class']}"


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
