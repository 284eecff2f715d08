"""recipes/title.py: equal losses and titles under every strategy, checkpoints, saved models, and Chinese words.

Two jobs. `title` of tests/matrix.py: from a BERT, titles of 4 to 16 tokens, batch sizes that do not divide the number
of texts, texts cut at 640 tokens (full attention). `varied`: from an encoder-decoder that generates another title for
each text, with uncut texts (sparse attention above 704 tokens), in the same micro-batches on 1, 2 and 3 processes.
"""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import AutoConfig, AutoTokenizer, BertConfig, BertModel, EncoderDecoderModel

from recipes import title
from tests import inputs
from tests.matrix import TITLES, runs
from tests.runs import WAYS, assert_same_run, lines_of, losses_of, slow_but, start
from tests.splits import global_batches
from tests.test_long import converted
from toolkit.config import PretrainedSettings
from toolkit.data.jieba_tokenizer import WordBackend
from toolkit.data.tokenizer import load_tokenizer
from toolkit.features.titles.evaluation import Writer
from toolkit.features.titles.model import load_title_model
from toolkit.features.titles.readable import readable
from toolkit.features.titles.settings import GenerationSettings
from toolkit.models.to_bigbird import long_model

SEED, LONGEST, STOPPED = 42, 16, 2


@inputs.made_once()
def writer(folder: Path) -> None:
    """An encoder-decoder, saved as by recipes/title.py, with strong cross-attention."""
    long = long_model(PretrainedSettings(model_name_or_path=str(inputs.sharp_model())), None)
    tokenizer, generation = load_tokenizer(long), GenerationSettings(num_beams=2)
    tiny = PretrainedSettings(model_name_or_path=str(inputs.tiny_model()))
    model = load_title_model(tiny, long, generation, tokenizer, LONGEST, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "crossattention" in name and name.endswith("weight") and "LayerNorm" not in name:
                parameter *= 40
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


VARIED = [*TITLES, "--model_name_or_path", writer, "--eval_every", STOPPED, "--learning_rate", "1e-3", "--max_length",
          4096, "--global_batch_size", 12, "--per_device_batch_size", 2, "--per_device_eval_batch_size", 2,
          "--no_repeat_ngram_size", 1, "--metric_for_best_model", "loss"]  # fmt: skip


def varied(way: str = "single") -> Path:
    return runs(way).run("titles varied", "recipes.title", VARIED)


def stopped() -> Path:
    words = [*VARIED, "--max_steps", STOPPED, "--checkpoint_every", STOPPED]
    return runs("zero3 x2").run("titles stopped", "recipes.title", words)


def resumed() -> Path:
    """In one process, from the ZeRO-3 checkpoint; it evaluates text by text."""
    saved = stopped() / f"checkpoints/step-{STOPPED:08d}"
    words = [*VARIED, "--per_device_eval_batch_size", 1, "--resume", saved]
    return runs("single").run("titles resumed", "recipes.title", words)


OTHERS = ["ddp x2", "zero3 x2", "ddp x3", "zero1 x2", "zero2_offload x2"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["resumed", *slow_but(OTHERS, "ddp x2")])
def test_titles_that_vary(way: str) -> None:
    """Strong cross-attention makes gradient norms less exact than losses."""
    run, after = (resumed(), STOPPED) if way == "resumed" else (varied(way), 0)
    assert losses_of(run) == pytest.approx(losses_of(varied())[after:], rel=1e-5)
    assert_same_run(run, varied(), rel=1e-4, after=after)


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", slow_but(["ddp x2", "zero3 x2", "zero3 x3"], "ddp x2", "zero3 x2"))
def test_titles_of_very_different_lengths_on_the_ranks(way: str) -> None:
    """One for each text, also where a rank has none."""
    words = [*TITLES, "--max_steps", 1, "--max_eval_samples", 3, "--per_device_eval_batch_size", 1]
    run = runs(way).run("uneven titles", "tests.features.titles.test_titles", words)
    lines = lines_of(run / "predictions.jsonl")
    rows = lines_of(inputs.titles("validation"))
    assert [line["reference"] for line in lines] == [rows[line["id"]]["title"] for line in lines]
    lengths = [len(line["title"]) for line in lines]
    assert len(lengths) == 3
    assert 4 * min(lengths) <= max(lengths)


_write = Writer.write


def write_unevenly(writer: Writer, encoded: dict[str, Any]) -> torch.Tensor:
    """On the main process titles end after one token, on the others never. Each calls the decoder equally often: with
    sharded parameters a call is a collective."""
    config = writer.module.generation_config
    if PartialState().is_main_process:
        config.exponential_decay_length_penalty = (0, 1000.0)
    else:
        config.suppress_tokens = [config.eos_token_id]
    calls: list[int] = []
    hook = writer.module.decoder.register_forward_hook(lambda *_: calls.append(1))
    ids = _write(writer, encoded)
    hook.remove()
    config.exponential_decay_length_penalty = config.suppress_tokens = None
    counts = gather_object([len(calls)])
    assert len(set(counts)) == 1, counts
    return ids


def main() -> None:
    """The job of `test_titles_of_very_different_lengths_on_the_ranks`."""
    with patch.object(Writer, "write", write_unevenly):
        title.main()


def test_the_loss_is_the_mean_over_the_tokens_of_all_titles(sharp_model: Path) -> None:
    """Step 1, recomputed text by text with transformers' classes and attention."""
    source = {"model_name_or_path": str(sharp_model), "dropout": 0, "attn_implementation": "eager"}
    settings = PretrainedSettings(**source)
    long = long_model(settings, None)
    tokenizer = AutoTokenizer.from_pretrained(str(long.model_name_or_path))
    model = load_title_model(settings, long, GenerationSettings(), tokenizer, LONGEST, SEED)
    assert type(model) is EncoderDecoderModel

    def tokens_of(name: str, length: int) -> list[torch.Tensor]:
        options = {"truncation": True, "max_length": length, "return_tensors": "pt"}
        rows = lines_of(inputs.titles("train"))
        return [tokenizer(row[name], **options)["input_ids"] for row in rows]

    texts, titles = tokens_of("text", 640), tokens_of("title", LONGEST + 1)
    lengths = np.array([text.shape[1] for text in texts])
    losses = []
    for place in global_batches(lengths, 13, SEED, 0)[0]:
        ids, title = texts[place], titles[place]
        with torch.no_grad():
            logits = model(input_ids=ids, decoder_input_ids=title[:, :-1]).logits[0]
        losses.append(F.cross_entropy(logits, title[0, 1:], reduction="none"))
    assert np.ptp([*map(len, losses)]) >= 8  # or a mean of means would agree
    expected = torch.cat(losses).mean().item()
    assert losses_of(runs("single")["title"])[0] == pytest.approx(expected, rel=1e-5)


def test_a_bigbird_becomes_a_bert_decoder_with_the_same_logits(sharp_model: Path) -> None:
    long = long_model(PretrainedSettings(model_name_or_path=str(sharp_model), dropout=0), None)
    tokenizer, generation = load_tokenizer(long), GenerationSettings(num_beams=2)
    decoder = load_title_model(long, long, generation, tokenizer, LONGEST, SEED).eval().decoder
    assert type(decoder).__name__ == "BertLMHeadModel"
    config = AutoConfig.from_pretrained(str(long.model_name_or_path))
    config.is_decoder = config.add_cross_attention = True
    config.attention_type = "original_full"
    theirs = transformers.BigBirdForCausalLM(config).eval()
    assert not theirs.load_state_dict(decoder.state_dict(), strict=False).unexpected_keys
    ids = torch.randint(5, 127, (2, 9))
    with torch.no_grad():
        mine, expected = (part(ids, use_cache=False).logits for part in (decoder, theirs))
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_the_saved_model_generates_the_same_titles() -> None:
    """Whose scores are those of the evaluation."""
    folder = resumed() / "model"
    model, loading = EncoderDecoderModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    titles = []
    for row in lines_of(inputs.titles("validation")):
        # short texts switch to full attention for good
        model.encoder.set_attention_type("block_sparse")
        text = tokenizer(row["text"], truncation=True, max_length=4096, return_tensors="pt")
        # searched as generation_config.json says
        written = model.generate(text["input_ids"], attention_mask=text["attention_mask"])
        titles.append(readable(tokenizer, written[0].tolist()))
    lines, last = lines_of(resumed() / "predictions.jsonl"), lines_of(resumed() / "eval.jsonl")[-1]
    assert titles == [line["title"] for line in lines]
    assert len(set(titles)) >= 8
    assert (last["rouge_segmenter"], last["rouge1"] > 0.01) == ("word", True)
    for name in ("rouge1", "rouge2", "rougeL"):
        assert np.mean([line["scores"][name] for line in lines]) == pytest.approx(last[name])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["single", "zero3 x2"])
def test_predict_generates_the_same_titles(way: str, tmp_path: Path) -> None:
    rows = [{"text": row["text"]} for row in lines_of(inputs.titles("validation"))]
    file, output = inputs.write_jsonl(tmp_path / "texts.jsonl", rows), tmp_path / "out.jsonl"
    words = [varied() / "model", file, "--output", output, "--per_device_batch_size", "2"]
    start(["toolkit", "predict", *words, *WAYS[way]]).succeeded()
    titles = [line["title"] for line in lines_of(varied() / "predictions.jsonl")]
    assert [line["prediction"] for line in lines_of(output)] == titles


@pytest.mark.multiprocess
def test_a_sharded_checkpoint_is_converted(tmp_path: Path) -> None:
    model = converted(stopped(), tmp_path / "out", EncoderDecoderModel, STOPPED)
    assert model.generation_config.num_beams == 2


WORDS = "华为 发布 手机 公司 今天 北京 上海 市场 价格 专家 表示 认为 天气 变化 交通 投资 增加 市民 反应 影响"


def test_chinese_titles(tmp_path: Path) -> None:
    """By a random BERT whose vocabulary has jieba's words and characters."""
    pytest.importorskip("jieba")
    rows = [{"正文": text, "标题": title} for title, text in 2 * inputs.CHINESE]
    data = inputs.write_jsonl(tmp_path / "news.jsonl", rows)
    letters = sorted({letter for row in rows for text in row.values() for letter in text})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), *letters]
    vocabulary = dict(zip(words, range(len(words)), strict=True))
    transformers.BertTokenizerFast(vocab=vocabulary, model_max_length=64).save_pretrained(tmp_path)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes)
    BertModel(config).save_pretrained(tmp_path)
    chinese = [*TITLES, "--model_name_or_path", tmp_path, "--train_file", data, "--validation_file",
               data, "--max_steps", 1, "--tokenizer", "jieba", "--rouge_segmenter", "char",
               "--max_length", 64, "--no_repeat_ngram_size", 1]  # fmt: skip
    run = runs("single").run("chinese titles", "recipes.title", chinese)
    assert {line["rouge_segmenter"] for line in lines_of(run / "eval.jsonl")} == {"char"}
    lines = lines_of(run / "predictions.jsonl")
    assert len(lines) == 10
    for line in lines:
        assert line["reference"] in dict(inputs.CHINESE)
        assert re.fullmatch(r"\S+", line["title"])  # no spaces
    # without --tokenizer jieba
    tokenizer = load_tokenizer(PretrainedSettings(model_name_or_path=str(run / "model")))
    assert isinstance(tokenizer.backend_tokenizer, WordBackend)
