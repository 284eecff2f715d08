"""The finished parts of a prediction, in a folder next to its output, until they are joined."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, listing
from toolkit.utils.files import explain_write_errors, replace_file

_NAME = re.compile(r"part-(\d+)-(\d+)\.parquet")


class Parts:
    """The folder OUTPUT.parts: job.json identifies the prediction, and part-START-END.parquet has
    the columns of predictions of these rows (from 0), without those of the input."""

    def __init__(self, output: Path, facts: dict[str, Any]) -> None:
        """`facts` identify the prediction (JSON)."""
        self.output = output
        self.facts = facts
        self.folder = output.with_name(f"{output.name}.parts")

    def open(self, overwrite: bool) -> None:
        """Creates the folder, or continues one of the same prediction. Raises UserError for that of
        another one, unless it is to be overwritten."""
        job = self.folder / "job.json"
        before = self.facts
        if job.is_file():
            before = json.loads(job.read_text(encoding="utf-8"))
        differing = [name for name in self.facts if self.facts[name] != before.get(name)]
        if differing and not overwrite:
            why = f"holds parts of another prediction (it differs in {listing(differing)})"
            remedy = "repeat its options, name another --output, or pass --overwrite to start over"
            raise UserError(f"{self.folder} {why}: {remedy}")
        if differing:
            shutil.rmtree(self.folder)
        with self.writing(), replace_file(job) as draft:
            draft.write_text(json.dumps(self.facts, ensure_ascii=False), encoding="utf-8")

    def finished(self) -> dict[int, int]:
        """First row -> end row of each part, in order."""
        matches = [_NAME.fullmatch(path.name) for path in self.folder.glob("part-*")]
        return dict(sorted((int(match[1]), int(match[2])) for match in matches if match))

    def missing(self, rows: int) -> list[str]:
        """The gaps between the parts, in rows from 1: `1 to 65536`. Raises UserError if two parts
        have a row."""
        gaps = []
        end = 0
        for first, last in [*self.finished().items(), (rows, rows)]:
            if first < end:
                twice = f"{self.folder} holds row {first + 1} twice"
                raise UserError(f"{twice}: remove the folder, and start again")
            if first > end:
                gaps.append(f"{end + 1} to {first}")
            end = last
        return gaps

    def write(self, start: int, columns: dict[str, list[Any]]) -> None:
        """Writes the predictions of the rows from `start`."""
        import pyarrow.parquet

        table = pyarrow.table(columns)
        path = self._path(start, start + table.num_rows)
        with self.writing(), replace_file(path) as draft:
            pyarrow.parquet.write_table(table, draft)

    def read(self) -> Iterator[Any]:
        """Yields the pyarrow table of each part, in order, all with the same types: a column may be
        null in one part and hold lists in another."""
        import pyarrow.parquet

        paths = [self._path(first, end) for first, end in self.finished().items()]
        schemas = [pyarrow.parquet.read_schema(path) for path in paths]
        schema = pyarrow.unify_schemas(schemas, promote_options="permissive")
        for path in paths:
            yield pyarrow.parquet.read_table(path).cast(schema)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Explains an error of the disk within it."""
        return explain_write_errors(self.output, f"finished parts stay in {self.folder}")

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def _path(self, start: int, end: int) -> Path:
        return self.folder / f"part-{start:010d}-{end:010d}.parquet"
