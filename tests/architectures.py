"""Small models of the architectures that people fine-tune: random weights, a tokenizer of the family's kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

SMALL = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 50,
         "max_position_embeddings": 128}  # fmt: skip
PADDED = {"max_position_embeddings": 130}  # positions are counted from pad_token_id + 1
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": -1,
           "position_buckets": 16, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
           "share_att_key": True, "type_vocab_size": 0}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    pretrained: str
    """The class whose weights lie on the hub."""
    tokenizer: str
    config: dict[str, Any] = field(default_factory=dict)
    settings: tuple[Any, ...] = ()
    """Of recipes/cls.py."""


QWEN = ("Qwen3ForCausalLM", "causal",
        {"num_key_value_heads": 1, "head_dim": 12, "tie_word_embeddings": True})  # fmt: skip
NARROW = {"embedding_size": 22}
V2 = {**DEBERTA, "conv_kernel_size": 3, "conv_act": "gelu"}
LOCAL = {"local_attention": 8, "num_hidden_layers": 4}
ULTRA = {"sliding_window": 8, "num_hidden_layers": 3, "prediction_head_size": 22}
ARCHITECTURES = {
    "BERT": Architecture("BertForMaskedLM", "wordpiece"),
    "RoBERTa": Architecture("RobertaForMaskedLM", "bpe", PADDED),
    "XLM-R": Architecture("XLMRobertaForMaskedLM", "unigram", PADDED),
    "ELECTRA": Architecture("ElectraForPreTraining", "wordpiece", NARROW),
    "ERNIE": Architecture("ErnieForMaskedLM", "wordpiece", {"use_task_id": True}),
    "DistilBERT": Architecture("DistilBertForMaskedLM", "wordpiece"),
    "ALBERT": Architecture("AlbertForMaskedLM", "unigram", NARROW),
    "DeBERTa-v2": Architecture("DebertaV2ForMaskedLM", "unigram", V2),
    "DeBERTa-v3": Architecture("DebertaV2ForMaskedLM", "unigram", DEBERTA),
    "ModernBERT": Architecture("ModernBertForMaskedLM", "bpe", LOCAL),
    "EuroBERT": Architecture(
        "EuroBertForMaskedLM", "bpe", {"num_key_value_heads": 1, "mask_token_id": 4}
    ),
    "NomicBERT": Architecture("NomicBertForMaskedLM", "wordpiece"),
    "UltraBERT": Architecture("UltrabertForMaskedLM", "wordpiece", ULTRA),
    "GTE": Architecture("GteForMaskedLM", "unigram"),
    "Longformer": Architecture("LongformerForMaskedLM", "bpe", {**PADDED, "attention_window": 16}),
    "BigBird": Architecture(
        "BigBirdForMaskedLM", "unigram", {"block_size": 4, "num_random_blocks": 1}
    ),
    "Qwen3": Architecture(*QWEN),
    "Qwen3, LoRA": Architecture(*QWEN, ("--lora_r", 4)),
}
# [first, padding, last, unknown, mask]
_SPECIAL = {"wordpiece": ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"),
            "causal": ("<|im_start|>", "<|endoftext|>", "<|im_end|>")}  # fmt: skip


def make_architecture(name: str, folder: Path, texts: Sequence[str]) -> Path:
    """Writes the model as its pretrained class is saved, with the tokenizer trained on `texts`."""
    architecture = ARCHITECTURES[name]
    tokenizer = make_tokenizer(architecture.tokenizer, texts)
    if not hasattr(transformers, architecture.pretrained):
        assert Version(transformers.__version__) < Version("5.20")
        pytest.skip(f"needs transformers 5.20 for {name}")
    kind = getattr(transformers, architecture.pretrained)
    special = () if architecture.tokenizer == "causal" else ("pad", "bos", "eos", "cls", "sep")
    ids = {f"{which}_token_id": getattr(tokenizer, f"{which}_token_id") for which in special}
    config = kind.config_class(vocab_size=len(tokenizer), **ids, **{**SMALL, **architecture.config})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(20240229)
        model = kind(config)
        for parameter in model.parameters():
            # attention prefers some tokens, as a pretrained model's
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(kind: str, texts: Sequence[str]) -> Any:
    """At most 300 tokens, with the special tokens of such models; `causal` adds none to a text and pads on the left."""
    special = _SPECIAL.get(kind, ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    common: Any = {"vocab_size": 300, "special_tokens": [*special], "show_progress": False}
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        trainer = trainers.WordPieceTrainer(**common)
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **common)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **common)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "causal":
        names: Any = {"pad_token": special[1], "eos_token": special[2], "padding_side": "left"}
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    first, pad, last, unknown, mask = special
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (first, last)],
    )  # fmt: skip
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token=first, bos_token=first, pad_token=pad, sep_token=last, eos_token=last,
        unk_token=unknown, mask_token=mask,
    )  # fmt: skip
