"""recipes/title.py: equal losses and titles under every strategy, checkpoints, saved models, and Chinese words.

Two jobs. `title` of tests/matrix.py: from a BERT, titles of 4 to 16 tokens, batch sizes that do not divide the number
of texts, texts cut at 640 tokens (full attention). `varied`: from an encoder-decoder that generates another title for
each text, with uncut texts (sparse attention above 704 tokens), in the same micro-batches on 1, 2 and 3 processes.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizerFast,
    EncoderDecoderModel,
)

from tests import inputs
from tests.matrix import TITLES, runs, words_of
from tests.runs import WAYS, lines_of, losses_of, slow_but, start
from tests.splits import global_batches
from tests.test_long import converted
from toolkit.config import PretrainedSettings
from toolkit.data.batches import Inputs
from toolkit.data.jieba_tokenizer import WordBackend
from toolkit.data.tokenizer import load_tokenizer
from toolkit.features.titles.evaluation import Writer
from toolkit.features.titles.model import load_title_model
from toolkit.features.titles.readable import readable
from toolkit.features.titles.settings import GenerationSettings
from toolkit.models.to_bigbird import long_model

SEED, LONGEST, STEPS, STOPPED = 42, 16, 4, 2
SCORES = ("rouge1", "rouge2", "rougeL")
COUNTS = "tests.features.titles.titles_worker"


def writer() -> Path:
    """An encoder-decoder, saved as by recipes/title.py, with strong cross-attention."""
    return inputs.shared("writer", make_writer)


def make_writer(folder: Path) -> None:
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
          "--no_repeat_ngram_size", 1]  # fmt: skip


def varied(way: str = "single") -> Path:
    return runs(way).run("titles varied", "recipes.title", VARIED)


def stopped() -> Path:
    words = [*VARIED, "--max_steps", STOPPED, "--checkpoint_every", STOPPED]
    return runs("zero3 x2").run("titles stopped", "recipes.title", words)


def resumed() -> Path:
    """In one process, from the ZeRO-3 checkpoint; it evaluates text by text."""
    words = [
        *VARIED,
        "--per_device_eval_batch_size",
        1,
        "--resume",
        stopped() / f"checkpoints/step-{STOPPED:08d}",
    ]
    return runs("single").run("titles resumed", "recipes.title", words)


def evaluations(run: Path) -> dict[int, dict[str, Any]]:
    """The first one of each step."""
    return {line["step"]: line for line in reversed(lines_of(run / "eval.jsonl"))}


def assert_same(run: Path, reference: Path, steps: range = range(STEPS)) -> None:
    assert losses_of(run) == pytest.approx(losses_of(reference)[steps.start : steps.stop], rel=1e-5)
    ours, theirs = (evaluations(folder) for folder in (run, reference))
    evaluated = [step for step in theirs if step - 1 in steps]
    assert evaluated
    for line, expected in ((ours[step], theirs[step]) for step in evaluated):
        assert (line["step"], line["split"], line["num_samples"]) == (
            expected["step"],
            expected["split"],
            12,
        )
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert [line[name] for name in SCORES] == pytest.approx(
            [expected[name] for name in SCORES], abs=1e-9
        )
    if steps.stop == STEPS:
        assert lines_of(run / "predictions.jsonl") == lines_of(reference / "predictions.jsonl")


@pytest.mark.multiprocess
def test_a_run_goes_on_under_another_way() -> None:
    assert np.ptp(losses_of(runs("single")["title"])) > 0.2
    assert_same(stopped(), varied(), range(STOPPED))
    assert_same(resumed(), varied(), range(STOPPED, STEPS))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "way", slow_but(["ddp x2", "zero3 x2", "ddp x3", "zero1 x2", "zero2_offload x2"], "ddp x2")
)
def test_titles_that_vary(way: str) -> None:
    assert_same(varied(way), varied())


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "way", slow_but(["ddp x2", "zero3 x2", "ddp x3", "zero3 x3", "zero1 x2"], "ddp x2", "zero3 x2")
)
def test_one_title_for_each_text_of_a_small_set(way: str) -> None:
    runs(way).run("every title", COUNTS, [inputs.tiny_model])
    assert "every title exactly once" in runs(way).log("every title")


@pytest.mark.multiprocess
def test_the_literal_command(tmp_path: Path) -> None:
    words = [
        "accelerate",
        "launch",
        "recipes/title.py",
        "--config_file",
        "accelerate_configs/zero2.yaml",
    ]
    words += [*words_of(TITLES), "--output_dir", str(tmp_path / "run")]
    start(words, env={"TESTS_WITHOUT_PAGES": ""}).succeeded()
    world = json.loads((tmp_path / "run" / "config.json").read_text())["world"]
    assert (world["num_processes"], world["distributed_type"]) == (2, "DEEPSPEED")
    assert_same(tmp_path / "run", runs("single")["title"])


def test_the_loss_is_the_mean_over_the_tokens_of_all_titles(sharp_model: Path) -> None:
    """Step 1, recomputed text by text with transformers' classes and attention."""
    settings = PretrainedSettings(
        model_name_or_path=str(sharp_model), dropout=0, attn_implementation="eager"
    )
    long = long_model(settings, None)
    tokenizer = AutoTokenizer.from_pretrained(str(long.model_name_or_path))
    model = load_title_model(settings, long, GenerationSettings(), tokenizer, LONGEST, SEED)
    assert type(model) is EncoderDecoderModel
    rows = lines_of(inputs.titles("train"))
    texts = [tokenizer(row["text"], truncation=True, max_length=640)["input_ids"] for row in rows]
    titles = [
        tokenizer(row["title"], truncation=True, max_length=LONGEST + 1)["input_ids"]
        for row in rows
    ]
    first_batch = global_batches(np.array([len(text) for text in texts]), 13, SEED, 0)[0]
    assert (
        np.ptp([len(titles[place]) for place in first_batch]) >= 8
    )  # or a mean of means would agree
    losses, tokens = 0.0, 0
    for place in first_batch:
        title = torch.tensor([titles[place]])
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([texts[place]]), decoder_input_ids=title[:, :-1]
            ).logits[0]
        losses += torch.nn.functional.cross_entropy(logits, title[0, 1:], reduction="sum").item()
        tokens += title.shape[1] - 1
    assert losses_of(runs("single")["title"])[0] == pytest.approx(losses / tokens, rel=1e-5)


def test_a_bigbird_becomes_a_bert_decoder_with_the_same_logits(
    sharp_model: Path, accelerator: Any
) -> None:
    long = long_model(PretrainedSettings(model_name_or_path=str(sharp_model), dropout=0), None)
    tokenizer = load_tokenizer(long)
    model = load_title_model(
        long, long, GenerationSettings(num_beams=2), tokenizer, LONGEST, SEED
    ).eval()
    assert type(model.decoder).__name__ == "BertLMHeadModel"
    config = AutoConfig.from_pretrained(str(long.model_name_or_path))
    config.is_decoder = config.add_cross_attention = True
    config.attention_type = "original_full"
    theirs = transformers.BigBirdForCausalLM(config).eval()
    assert not theirs.load_state_dict(model.decoder.state_dict(), strict=False).unexpected_keys
    ids = torch.randint(5, 127, (2, 9))
    with torch.no_grad():
        mine, expected = (
            part(input_ids=ids, use_cache=False).logits for part in (model.decoder, theirs)
        )
        assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-4)
        assert model.generate(input_ids=ids).shape[0] == 2
        model.generation_config.num_return_sequences = 2
        titles = Writer(accelerator, model)
        encoded = titles.encode(SimpleNamespace(inputs=Inputs(input_ids=ids)))
        assert titles.write(*encoded).shape == (2, LONGEST)


def test_one_line_for_each_title() -> None:
    rows = lines_of(inputs.titles("validation"))
    lines = lines_of(varied() / "predictions.jsonl")
    assert [line["id"] for line in lines] == list(range(12))
    assert len({line["title"] for line in lines}) >= 8
    assert all(list(line) == ["id", "title", "reference", "scores"] for line in lines)
    assert [line["reference"] for line in lines] == [row["title"] for row in rows]
    last = lines_of(varied() / "eval.jsonl")[-1]
    assert last["rouge_segmenter"] == "word"
    assert last["rouge1"] > 0.01
    for name in SCORES:
        assert np.mean([line["scores"][name] for line in lines]) == pytest.approx(
            last[name], abs=1e-6
        )


def test_the_saved_model_generates_the_same_titles() -> None:
    folder = resumed() / "model"
    model, loading = EncoderDecoderModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "generation_config.json").read_text())
    assert {
        "max_new_tokens": LONGEST,
        "num_beams": 2,
        "no_repeat_ngram_size": 1,
    }.items() <= config.items()
    assert config["decoder_start_token_id"] == tokenizer.cls_token_id
    assert config["eos_token_id"] == tokenizer.sep_token_id
    titles = []
    for row in lines_of(inputs.titles("validation")):
        model.encoder.set_attention_type(
            "block_sparse"
        )  # short texts switch to full attention for good
        text = tokenizer(row["text"], truncation=True, max_length=4096, return_tensors="pt")
        written = model.generate(text["input_ids"], attention_mask=text["attention_mask"])
        titles.append(readable(tokenizer, written[0].tolist()))
    assert titles == [line["title"] for line in lines_of(resumed() / "predictions.jsonl")]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["single", "zero3 x2"])
def test_predict_generates_the_same_titles(way: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    table = tmp_path / "texts.jsonl"
    pd.DataFrame(lines_of(inputs.titles("validation")))[["text"]].to_json(
        table, orient="records", lines=True
    )
    words = [
        varied() / "model",
        table,
        "--output",
        output,
        "--per_device_batch_size",
        "2",
        *WAYS[way],
    ]
    start(["toolkit", "predict", *words]).succeeded()
    titles = [line["title"] for line in lines_of(varied() / "predictions.jsonl")]
    assert [line["prediction"] for line in lines_of(output)] == titles


@pytest.mark.multiprocess
def test_a_sharded_checkpoint_is_converted(tmp_path: Path) -> None:
    converted(stopped(), tmp_path / "out", EncoderDecoderModel, STOPPED)
    folders = (tmp_path / "out", stopped() / "model")
    converted_config, expected = (
        json.loads((folder / "generation_config.json").read_text()) for folder in folders
    )
    assert converted_config == expected


CHINESE = [
    ("华为发布新手机", "华为公司今天在北京发布新手机,公司表示新手机的价格没有变化,市场反应很好。"),
    ("北京市场价格上涨", "北京市场的价格今天上涨,专家表示价格上涨的原因是天气变化,市民反应不大。"),
    ("公司增加投资", "公司今天表示增加投资,新的投资在上海市场,专家认为公司的发展很好。"),
    ("专家认为经济发展很好", "专家今天在北京表示,中国经济发展很好,市场没有大的变化,投资增加。"),
    ("新手机价格没有变化", "公司发布的新手机价格没有变化,市场反应不大,市民认为价格很好。"),
]
WORDS = "华为 发布 手机 公司 今天 北京 上海 市场 价格 专家 表示 认为 天气 变化 交通 投资 增加 市民 反应 影响"


@pytest.fixture(scope="module")
def chinese(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """10 rows, and a random BERT whose vocabulary has jieba's words and characters."""
    pytest.importorskip("jieba")
    folder = tmp_path_factory.mktemp("chinese")
    rows = [{"正文": text, "标题": title} for title, text in CHINESE]
    rows += [
        {"正文": text + CHINESE[place - 1][1], "标题": title}
        for place, (title, text) in enumerate(CHINESE)
    ]
    pd.DataFrame(rows).to_json(folder / "news.jsonl", orient="records", lines=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
    words += sorted({letter for row in rows for text in row.values() for letter in text})
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    model = folder / "word-bert"
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64).save_pretrained(model)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        BertModel(BertConfig(vocab_size=len(words), hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
                             intermediate_size=32, max_position_embeddings=64)).save_pretrained(model)  # fmt: skip
    return ["--model_name_or_path", model, "--train_file", folder / "news.jsonl", "--validation_split", 0.4,
            "--max_steps", 2, "--global_batch_size", 6, "--per_device_batch_size", 4, "--tokenizer", "jieba",
            "--rouge_segmenter", "char", "--max_target_length", 6, "--num_beams", 2, "--no_repeat_ngram_size", 1,
            "--report_to", "none", "--mixed_precision", "no"]  # fmt: skip


def test_chinese_titles(chinese: list[Any]) -> None:
    run = runs("single").run("chinese titles", "recipes.title", chinese)
    assert {line["rouge_segmenter"] for line in lines_of(run / "eval.jsonl")} == {"char"}
    lines = lines_of(run / "predictions.jsonl")
    assert len(lines) == 4
    for line in lines:
        assert line["reference"] in dict(CHINESE)
        assert re.fullmatch(r"\S+", line["title"])  # no spaces
    facts = json.loads((run / "config.json").read_text())["data"]
    assert facts["title_column"] == "标题"
    tokenizer = load_tokenizer(
        PretrainedSettings(model_name_or_path=str(run / "model"))
    )  # without --tokenizer jieba
    assert isinstance(tokenizer.backend_tokenizer, WordBackend)
    assert EncoderDecoderModel.from_pretrained(run / "model").config.decoder.vocab_size == len(
        tokenizer
    )
