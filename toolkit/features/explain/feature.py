"""`toolkit report RUN --explain 5`: attributions of the words in the worst mistakes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.utils.features import Feature, PagePart


class ExplainFeature(Feature):
    def add_options(self, command: str, parser: argparse.ArgumentParser) -> None:
        if command == "report":
            parser.add_argument(
                "--explain", type=int, choices=range(1, 21), default=0, metavar="ROWS",
                help="colour the words by their attribution in this many of the worst mistakes, at most 20 [0]",
            )  # fmt: skip

    def results(
        self, folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any
    ) -> Sequence[str]:
        from toolkit.report.files import architecture

        if data is None or not data.facts.get("labels") or not architecture(folder / "model"):
            return ()
        run = shlex.quote(str(folder))
        return [f"  toolkit report {run} --explain 5   shows which words led to the worst mistakes"]

    def page(self, page: Any) -> PagePart | None:
        rows = getattr(page.options, "explain", 0)
        if not rows:
            return None
        if not page.record.data.get("labels"):
            raise UserError("--explain is for classification and regression only")
        if not page.texts:
            remedy = (
                "which this machine's cache lacks: run `toolkit prepare` with the run's settings"
            )
            raise UserError(f"--explain needs the texts of the last evaluation, {remedy}")
        from markupsafe import Markup

        from toolkit.features.explain.page import explain
        from toolkit.report.templates import render

        explanations = explain(page.folder, page.record.data, page.worst[:rows], page.texts)
        words = Path(__file__).with_name("words.html")
        texts = {place: Markup(render(words, each)) for place, each in explanations.items()}
        return PagePart(
            Path(__file__).with_name("page.html"), {"explanations": explanations}, texts=texts
        )


FEATURE = ExplainFeature()
