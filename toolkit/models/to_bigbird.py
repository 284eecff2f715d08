"""Any BERT -> a BigBird of the same weights that reads long texts.

BigBird (Zaheer et al. 2020, arXiv:2007.14062) has BERT's layers; what differs is which tokens attend to which. So
every weight moves over as it is, but for the position table, which is repeated until it is long enough, as Longformer
does (Beltagy et al. 2020, arXiv:2004.05150, section 5). Up to (5 + 2 random) * block tokens BigBird runs full
attention: within BERT's own positions it then gives BERT's numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import BertForPreTraining, BigBirdConfig, BigBirdForMaskedLM, BigBirdForPreTraining, BigBirdModel

from toolkit.config import ModelSettings, PretrainedSettings
from toolkit.demo import PREFIX, model_path
from toolkit.errors import UserError, listing
from toolkit.models.bigbird import plan
from toolkit.pretrained import (
    explain_load_errors,
    full_attention_up_to,
    load_config,
    load_plain_tokenizer,
    model_digest,
    quiet_transformers,
    refuse_random,
    whole_weights,
)
from toolkit.utils.cache import cached_folder, digest_of_file
from toolkit.utils.files import explain_write_errors, make_readable, replace_folder

if TYPE_CHECKING:
    from accelerate import Accelerator

Settings = TypeVar("Settings", bound=PretrainedSettings)

_MADE_BY = "toolkit to-bigbird"
_META = "meta.json"
_LAYOUT = 1  # of what is in the cache: a change here that changes it counts this up
# What a tokenizer that was saved and loaded wrongly would read differently: case, accents, Chinese, special tokens
_PROBES = ("今天的服務很好，房间小。", "The Café's 2nd ROOM wasn't bad!\n東京 [MASK] 42", "ﬁlm\u3000𠮷 😀 ２０２４年")

_ENCODER = re.compile(r"(bert\.)?(embeddings|encoder|pooler)\.")
_POOLER, _DECODER = "bert.pooler.", "cls.predictions.decoder.weight"
_HEADS = {"MLM": "cls.predictions.", "NSP": "cls.seq_relationship."}
_FAMILIES = {(): BigBirdModel, ("MLM",): BigBirdForMaskedLM, ("MLM", "NSP"): BigBirdForPreTraining}
_COPIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "type_vocab_size",
    "initializer_range", "layer_norm_eps", "pad_token_id", "tie_word_embeddings",
)  # fmt: skip


class SparseSizes(NamedTuple):
    """How far a BigBird reads, and what each token in it attends to."""

    max_length: int = 4096  # tokens
    block_size: int = 64  # tokens
    num_random_blocks: int = 3  # that each block of queries reads besides its neighbours

    @property
    def sparse_above(self) -> int:
        """Tokens up to which the pattern does not fit."""
        return full_attention_up_to(self.block_size, self.num_random_blocks)


def to_bigbird(source: str, output: Path, sizes: SparseSizes, overwrite: bool = False) -> list[str]:
    """Writes a BigBird with the weights of `source` (a folder, a hub name or a `demo:` name) to the folder `output`.

    The folder has its name only when it is complete. With `overwrite` it may replace one that this function wrote
    and nobody has changed since. Returns lines that say what was made. Raises UserError for a source that is no BERT,
    lacks a tokenizer or does not fit its config, for a length that does not fit, and for an output that is there.
    """
    with explain_write_errors(output):
        _check_place(output, overwrite)
    config = load_config(ModelSettings(model_name_or_path=source))
    _check_kind(source, config)
    _check_length(source, config.max_position_embeddings, sizes)
    with explain_write_errors(output), replace_folder(output, overwrite) as draft:
        parameters, heads = _write(source, draft, sizes)
        files = {path.name: digest_of_file(path) for path in sorted(draft.iterdir())}
        meta = {"made_by": _MADE_BY, "source": source, "files": files}
        (draft / _META).write_text(json.dumps(meta, ensure_ascii=False, indent=1), encoding="utf-8")
    return [
        f"wrote {output}: a BigBird of {parameters:,} parameters and {sizes.max_length} positions (the BERT had "
        f"{config.max_position_embeddings}), sparse above {sizes.sparse_above} tokens",
        heads,
        f"next: python recipes/bigbird.py --model_name_or_path {shlex.quote(str(output))} --train_file YOUR_FILE.csv",
    ]


def long_model(settings: Settings, max_length: int | None, accelerator: Accelerator | None = None) -> Settings:
    """The settings with a BigBird in place of a BERT, of 4096 positions or `max_length` tokens if that is more.

    It is written once per machine, to the cache; all processes must call this. A BigBird, and no model, are
    returned as they are. Raises UserError for other models.
    """
    if settings.model_name_or_path is None:
        return settings
    name, config = settings.model_name_or_path, load_config(settings)
    if config.model_type in ("big_bird", "encoder-decoder"):  # the latter was made of one, by recipes/title.py
        return settings
    _check_kind(name, config)
    usual = SparseSizes()
    length = max(usual.max_length, max_length or 0, config.max_position_embeddings)
    sizes = usual._replace(max_length=-(-length // usual.block_size) * usual.block_size)

    with explain_load_errors(name):
        folder_name = _folder_name(name, sizes)
    with cached_folder("models", folder_name, accelerator, source=name) as (folder, draft):
        if draft:
            _write(name, draft, sizes)
    return dataclasses.replace(settings, model_name_or_path=str(folder))


def _folder_name(name: str, sizes: SparseSizes) -> str:
    """A digest of the content, with a readable beginning: a model card names its base model so."""
    base = re.sub(r"[^\w.-]", "-", Path(name.removeprefix(PREFIX)).absolute().name)
    digits = hashlib.sha256(f"{_LAYOUT} {sizes} {model_digest(name)}".encode()).hexdigest()[:16]
    return f"{base}-bigbird-{sizes.max_length}-{digits}"


def _write(name: str, folder: Path, sizes: SparseSizes) -> tuple[int, str]:
    """Fills an empty folder, and returns the number of parameters and which heads it has.

    Raises UserError when the source cannot be loaded or does not fit.
    """
    tokenizer = load_plain_tokenizer(name)
    bert, new, unknown = _load(name)
    pooler, mlm, nsp = (not _within(new, prefix) for prefix in (_POOLER, *_HEADS.values()))
    heads = (("MLM", "NSP") if nsp and pooler else ("MLM",)) if mlm else ()
    config = _config_of(bert, tokenizer, sizes)
    family = _FAMILIES[heads]
    weights = {key: weight for key, weight in bert.state_dict().items() if key not in new}
    prefixes = ("bert.", *(_HEADS[head] for head in heads))
    dropped = sorted({*unknown, *(key for key in weights if not key.startswith(prefixes) and key != _DECODER)})
    tensors = _renamed(name, weights, family, config, pooler)
    config.architectures, config.dtype = [family.__name__], str(bert.dtype).removeprefix("torch.")
    # `save_pretrained` writes in the first process of a group only, and says nothing in the others
    config.to_json_file(folder / "config.json")
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for one
        raise OSError(errno.EIO, str(error)) from error
    _save_tokenizer(name, tokenizer, folder, sizes.max_length)
    make_readable(folder)
    head_names = f"{' and '.join(heads)} head{'s' * (len(heads) > 1)} kept"
    message = head_names if heads else "the BERT has no MLM head to keep"
    message += "" if pooler else "; no pooler, which the BERT has not"
    message += f"; left behind: {listing(dropped, 4)}" if dropped else ""
    return sum(tensor.numel() for tensor in tensors.values()), message


def _within(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def _load(name: str) -> tuple[Any, set[str], list[str]]:
    """Whatever head the checkpoint has: BertForPreTraining holds them all, but for those of a task.

    Returns the model, names in it that did not come from the checkpoint (random, that is), and names in the
    checkpoint that it has no place for. Raises UserError for an encoder that is not whole.
    """
    with explain_load_errors(name), whole_weights(), quiet_transformers():
        bert, loading = BertForPreTraining.from_pretrained(
            model_path(name), dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True
        )
    mismatched, unknown = [key for key, *_ in loading["mismatched_keys"]], sorted(loading["unexpected_keys"])
    new = {*loading["missing_keys"], *mismatched}
    pooler = _within(new, _POOLER)
    lost = set(_within(new, "bert.")) - set(pooler) | set(_within(mismatched, "bert."))
    lost |= set(pooler) if len(pooler) == 1 else set()  # half of it
    lost |= {key for key in unknown if _ENCODER.match(key)}  # layers that the config does not count
    refuse_random(name, lost)
    return bert, new, unknown


def _config_of(bert: Any, tokenizer: Any, sizes: SparseSizes) -> BigBirdConfig:
    """BERT's sizes and its tokenizer's ids; BigBird's own defaults are those of another vocabulary."""
    options = {name: getattr(bert.config, name) for name in _COPIED}
    # by the weights: transformers leaves an output layer of its own untied, whatever the config says
    options["tie_word_embeddings"] = bert.get_output_embeddings().weight is bert.get_input_embeddings().weight
    if options["pad_token_id"] is None:
        options["pad_token_id"] = tokenizer.pad_token_id
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    return BigBirdConfig(
        **options,
        max_position_embeddings=sizes.max_length,
        attention_type="block_sparse",
        block_size=sizes.block_size,
        num_random_blocks=sizes.num_random_blocks,
        rescale_embeddings=False,
        use_bias=True,
        bos_token_id=tokenizer.cls_token_id if first is None else first,
        eos_token_id=tokenizer.sep_token_id if last is None else last,
        sep_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
    )


def _renamed(name: str, weights: dict[str, Tensor], family: Any, config: BigBirdConfig, pooler: bool) -> dict[str, Any]:
    """BERT's tensors under the names of each parameter of the BigBird, once where two are tied.

    The position table is repeated over and over, so that neighbours stay neighbours but at the seams. Raises UserError
    for a parameter that BERT has not.
    """
    with torch.device("meta"):
        model = family(config)
    prefix = "bert." if family is BigBirdModel else ""
    table = "bert.embeddings.position_embeddings.weight"
    rows = torch.arange(config.max_position_embeddings) % weights[table].shape[0]
    renamed = {key.replace("bert.pooler.dense.", _POOLER): weight for key, weight in weights.items()}
    renamed[table] = weights[table][rows]
    shapes = {
        key: parameter.shape
        for key, parameter in model.named_parameters()
        if pooler or not f"{prefix}{key}".startswith(_POOLER)  # a random one would pass for pretrained
    }
    misfits = [key for key, shape in shapes.items() if getattr(renamed.get(prefix + key), "shape", None) != shape]
    if misfits:
        raise UserError(f"{name}: {listing(misfits, 3)} do not fit a BigBird: is it a BERT of transformers?")
    return {key: renamed[prefix + key].contiguous() for key in shapes}


def _save_tokenizer(name: str, tokenizer: Any, folder: Path, max_length: int) -> None:
    """Saves BERT's, and verifies that AutoTokenizer loads it beside a BigBird's config, not BigBird's own.

    Raises UserError when it tokenizes a text otherwise.
    """
    tokenizer.model_max_length = max_length
    ids = tokenizer(list(_PROBES)).input_ids  # also takes off a truncation that tokenizer.json may have brought
    tokenizer.save_pretrained(folder)
    reloaded = load_plain_tokenizer(str(folder))
    if type(reloaded) is not type(tokenizer) or reloaded(list(_PROBES)).input_ids != ids:
        raise UserError(
            f"{name}: its tokenizer, a {type(tokenizer).__name__}, is a {type(reloaded).__name__} after saving and may "
            "read texts otherwise: name its class as tokenizer_class in its tokenizer_config.json"
        )


def _check_kind(name: str, config: Any) -> None:
    """Raises UserError for a model whose weights would compute something else in a BigBird."""
    kind = config.model_type
    if kind == "big_bird":
        raise UserError(f"{name} is a BigBird already, of {config.max_position_embeddings} positions: use it as it is")
    if kind != "bert":
        raise UserError(
            f"{name} is of model_type {kind}, and only bert becomes a BigBird: bert-base-chinese, bert-base-uncased, "
            "hfl/chinese-roberta-wwm-ext (a BERT, whatever its name says), or name a BigBird itself"
        )
    positions = getattr(config, "position_embedding_type", None) or "absolute"  # old configs have it
    if positions != "absolute":
        raise UserError(
            f"{name} has position_embedding_type {positions}, which BigBird has not: take a BERT with absolute "
            "positions, as most have"
        )
    if config.is_decoder or config.add_cross_attention:
        raise UserError(f"{name} is a decoder (is_decoder or add_cross_attention in its config.json): take an encoder")


def _check_length(name: str, positions: int, sizes: SparseSizes) -> None:
    """Raises UserError for lengths that do not fit together; `positions` are the BERT's."""
    length, block, random = sizes
    pattern = f"--block_size {block} and --num_random_blocks {random}"
    if block < 1 or random < 1:
        raise UserError(f"{pattern}: both are at least 1; 64 and 3 are usual")
    fault = ""
    if length < positions:
        fault = f"less than the {positions} positions {name} has: ask for more, or cut texts when they are tokenized"
    elif length % block:
        fault = f"no multiple of --block_size {block}: take {-(-length // block) * block}"
    elif length <= sizes.sparse_above:
        fault = (
            f"too short for the sparse pattern: with {pattern} texts of up to {sizes.sparse_above} tokens get full "
            f"attention; take {sizes.sparse_above + block} or more, or smaller blocks"
        )
    if fault:
        raise UserError(f"--max_length {length} is {fault}")
    try:  # otherwise training would end at the first batch of a length with a rule of its own
        for width in plan.PAPER_LENGTHS:
            if sizes.sparse_above < width <= length and width % block == 0:
                plan.random_blocks(plan.Pattern(0, 1, block, random, length, width, training=True))
    except ValueError as error:
        raise UserError(
            f"{pattern} want more random blocks than BigBird draws from (the first 1024 tokens): take fewer"
        ) from error


def _check_place(output: Path, overwrite: bool) -> None:
    """Raises UserError for what must not be replaced."""
    if os.path.lexists(output) and (not output.is_dir() or output.is_symlink()):
        raise UserError(f"{output} is there and is not a folder: name another output")
    present = sorted(output.iterdir()) if output.exists() else []
    if present and not overwrite:
        raise UserError(f"{output} is there and not empty: name another folder, or replace it with --overwrite")
    if foreign := _foreign(present, output / _META):
        raise UserError(
            f"{output} holds {listing(foreign, 3)}, not as {_MADE_BY} wrote it, and --overwrite would remove that: "
            "name another folder, or remove it yourself"
        )


def _foreign(present: Sequence[Path], meta: Path) -> list[str]:
    """The names of files that this command did not write, or somebody has changed since."""
    digests: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):  # it may be anybody's
        content = json.loads(meta.read_text(encoding="utf-8"))
        digests = dict(content["files"]) if content["made_by"] == _MADE_BY else {}
    others = [path for path in present if path != meta or not digests]
    return [path.name for path in others if not path.is_file() or digests.get(path.name) != digest_of_file(path)]
