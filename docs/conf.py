"""Sphinx configuration of the site, built once for each language (`make docs`). The source folder is the repository, so
that links work both on the site and in the repository; with `-t zh`, page NAME is NAME.zh.md if it exists."""

import functools
import inspect
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.update(COLUMNS="100", HF_HUB_OFFLINE="1")

from sphinx.search import SearchLanguage, languages  # noqa: E402

import toolkit  # noqa: E402
from toolkit import cli, config  # noqa: E402
from toolkit.config.parse import metavar  # noqa: E402

CHINESE = tags.has("zh")  # type: ignore[name-defined]  # noqa: F821  defined by Sphinx
DESCRIPTION = (
    "用一台到两台机器、1 到 16 张显卡微调 BERT 类编码器：训练脚本只写一次，单进程、DDP、ZeRO、FSDP2 下损失相同。"
    if CHINESE else tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
)  # fmt: skip
project = html_title = "finetune-toolkit"
version = release = toolkit.__version__
language, OTHER = ("zh_CN", "English") if CHINESE else ("en", "中文")
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "benchmarks/results/*.md",
    "changelog/*.md",
    "C*.md",
    "SECURITY*.md",
]
translated = [
    str(path.relative_to(ROOT))
    for folder in (ROOT, ROOT / "docs")
    for path in folder.glob("*.zh.md")
]
if CHINESE:
    source_suffix = {".zh.md": "markdown", ".md": "markdown"}
    exclude_patterns = [name.replace(".zh.md", ".md") for name in translated]
else:
    source_suffix = {".md": "markdown"}
    exclude_patterns = list(translated)
myst_heading_anchors = 4
highlight_language = "text"  # for blocks without a language
html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}
html_copy_source = html_show_sphinx = html_show_copyright = False
python_maximum_signature_line_length = 100
suppress_warnings = ["toc.not_included"] if CHINESE else []  # the English build reports it


class Characters(SearchLanguage):
    """Indexes Chinese by pairs of characters, and splits queries the same way, so that no dictionary is needed."""

    lang, language_name = "zh", "Chinese"
    js_splitter_code = """var splitQuery = (query) =>
  (query.match(/[\\u4e00-\\u9fff]+|(?:(?![\\u4e00-\\u9fff])[\\p{L}\\p{N}_])+/gu) || []).flatMap((word) =>
    word >= "\\u4e00" && word.length > 2 ? [...word].slice(1).map((last, i) => word[i] + last) : [word]);"""

    def split(self, text):
        words = re.findall(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+", text)
        pairs = (
            [w] if len(w) < 3 or w < "\u4e00" else map("".join, itertools.pairwise(w))
            for w in words
        )
        return [word for group in pairs for word in group]

    def stem(self, word):
        return word.lower()

    def word_filter(self, word):
        return len(word) > 1


languages["zh"] = Characters


def signature(thing):
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing)))


def api():
    """The names that `import toolkit` offers, with their docstrings (Markdown)."""
    offered = toolkit.__all__
    for name in sorted(offered, key=str.lower):
        thing = getattr(toolkit, name)
        yield f"\n### {name}\n"
        yield f"````{{py:{'class' if inspect.isclass(thing) else 'function'}}} toolkit.{name}{signature(thing)}\n"
        yield inspect.getdoc(thing) or ""
        for method, function in vars(thing).items() if inspect.isclass(thing) else ():
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"\n```{{py:method}} {method}{signature(function)}\n\n{inspect.getdoc(function) or ''}\n```"
        yield "````"


def settings():
    """All settings of all recipes, a table for each section."""
    sections = {
        s: None for task in config.tasks().values() for s in config.sections_of(task).values()
    }
    for section in sections:
        yield f"\n### {(inspect.getdoc(section) or '').partition(chr(10))[0].rstrip('.')} ({section.__name__})\n"
        yield "| setting | | values | default |\n|---|---|---|---|"
        for name, field in config.fields_of(section).items():
            values = " ".join(f"`{value}`" for value in metavar(field.annotation).split("|"))
            cells = (f"`--{name}`", field.description or "", values, field.default)
            yield (
                "| "
                + " | ".join(re.sub(r"\s+", " ", str(c)).replace("|", "\\|") for c in cells)
                + " |"
            )


@functools.cache
def commands():
    """What each command prints for `--help`."""
    parts = []
    for command in ("toolkit", *(f"toolkit {name}" for name in cli.commands())):
        words = [sys.executable, "-m", *command.split(), "--help"]
        shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        parts.append(
            f"\n### {command}\n\n```text\n{shown.replace(str(Path.home()), '~').rstrip()}\n```"
        )
    return parts


def markdown(docname, text):
    """The page with its generated parts, and a link to the other language."""
    up, name = "../" * (docname.count("/") + CHINESE), re.escape(docname.rpartition("/")[2])
    text = re.sub(
        rf"\[[^\]]+\]\({name}{'' if CHINESE else '.zh'}\.md\)",
        f'<a class="language" href="{up}{"" if CHINESE else "zh/"}{docname}.html">{OTHER}</a>',
        text, count=1,
    )  # fmt: skip
    makers = {"api": api, "settings": settings, "commands": commands}
    text = re.sub(
        r"^<!-- made here: (\w+) -->$",
        lambda match: "\n".join(makers[match[1]]()),
        text,
        flags=re.MULTILINE,
    )
    if (
        CHINESE and f"{docname}.zh.md" not in translated
    ):  # headings of other pages have Chinese names
        text = re.sub(r"\.md#[^)]+\)", ".md)", text)
    text = text.replace("```mermaid", "```text")
    return re.sub(r"\]\((?:\.\./)*README(?:\.zh)?\.md", "](/docs/index.md", text)


def finish(app, error):
    """Write each page's Markdown next to its HTML, llms.txt, and the site's index.html."""
    if error or app.builder.name != "html":
        return
    title, out = {}, Path(app.outdir)
    for docname in app.env.found_docs:
        text = markdown(docname, Path(app.env.doc2path(docname)).read_text(encoding="utf-8"))
        text = re.sub(
            r'<a class="language" href="([^"]+)\.html">(\w+)</a>',
            r"[\2](\1.md)",
            text.replace(".zh.md", ".md"),
        )
        (out / f"{docname}.md").write_text(text, encoding="utf-8")
        title[docname] = app.env.titles[docname].astext()
    lines = [f"# {project}\n\n> {DESCRIPTION}"]
    for line in Path(app.env.doc2path(root_doc)).read_text(encoding="utf-8").splitlines():
        if line.startswith(":caption:"):
            lines.append(f"\n## {line.removeprefix(':caption: ')}\n")
        elif (
            docname := os.path.normpath(line[1:] if line.startswith("/") else f"docs/{line}")
        ) in title:
            lines.append(f"- [{title[docname]}]({docname}.md)")
    (out / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "index.html").write_text(
        '<meta http-equiv="refresh" content="0; url=docs/index.html">', encoding="utf-8"
    )


def read(app, docname, source):
    """Give links whose text is a file name the title of the page or section."""
    named = r"\[(?:docs/|benchmarks/results/)?([\w.-]+\.md)\]\(((?:[\w./-]*/)?\1(?:#[^)]*)?)\)"
    source[0] = re.sub(named, r"[](\2)", markdown(docname, source[0]))


def setup(app):
    app.connect("source-read", read)
    app.connect("build-finished", finish)
