"""The finished parts of an output of `toolkit predict`, in a folder next to it, until they are joined."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toolkit.data.read import format_of
from toolkit.data.text_files import DELIMITERS, OPENERS, cast_batch
from toolkit.errors import UserError, listing
from toolkit.report.files import dumps
from toolkit.utils.files import explain_write_errors, replace_file

_NAME = re.compile(r"part-(\d+)-(\d+)")


class Parts:
    """The folder OUTPUT.parts. manifest.json identifies the job; part-FIRST-END holds the output for these rows (from
    0), and is written atomically."""

    def __init__(
        self, output: Path, encoding: str, unquoted: bool = False, facts: Any = None
    ) -> None:
        """`unquoted`: write CSV and TSV as `--quoting none` reads them. `facts` identify the job (JSON)."""
        self.output, self.encoding, self.kind, self.facts = (
            output,
            encoding,
            format_of(output),
            facts,
        )
        self.quoting: Any = csv.QUOTE_NONE if unquoted else csv.QUOTE_MINIMAL
        self.folder = output.with_name(f"{output.name}.parts")
        self.manifest = self.folder / "manifest.json"
        self.joining = self.folder / "joining"

    def open(self, overwrite: bool) -> None:
        """Creates the folder, or continues one of the same job. Raises UserError for the folder of another job."""
        facts, before = self.facts, self._saved_facts()
        if self.joining.is_dir() and not self.finished():  # the output is made again
            self.manifest.unlink(missing_ok=True)
            shutil.rmtree(self.joining, ignore_errors=True)
        elif before and (differing := [name for name in facts if facts[name] != before.get(name)]):
            if self.finished() and not overwrite:
                why = f"holds parts of another prediction (it differs in {listing(differing)})"
                remedy = (
                    "repeat its options, name another --output, or pass --overwrite to start over"
                )
                raise UserError(f"{self.folder} {why}: {remedy}")
            shutil.rmtree(self.folder)
        if not self.manifest.is_file():
            with self._writing(), replace_file(self.manifest) as draft:
                draft.write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")

    def are_joined(self) -> bool:
        """Whether the output was joined from shards of the same job; the parts are removed after that."""
        joined = self.joining.is_dir() and not self.finished() and self.output.is_file()
        return joined and self._saved_facts() == self.facts

    def _saved_facts(self) -> dict[str, Any]:
        return (
            dict(json.loads(self.manifest.read_text(encoding="utf-8")))
            if self.manifest.is_file()
            else {}
        )

    def finished(self) -> dict[int, int]:
        """First row -> end row of each part, in order."""
        matches = (_NAME.fullmatch(path.stem) for path in self.folder.glob("part-*"))
        return dict(sorted((int(match[1]), int(match[2])) for match in matches if match))

    def missing(self, rows: int) -> list[str]:
        """The gaps between the parts, in rows from 1: `1 to 65536`. Raises UserError if two parts have a row."""
        gaps, at = [], 0
        for start, end in [*self.finished().items(), (rows, rows)]:
            if start < at:  # windows of different versions of a library
                raise UserError(
                    f"{self.folder} holds row {start + 1} twice: remove the folder, and start again"
                )
            if start > at:
                gaps.append(f"{at + 1} to {start}")
            at = end
        return gaps

    def write(self, start: int, rows: Any, columns: dict[str, list[Any]]) -> None:
        """Writes a part: rows (an Arrow table) with the columns of predictions. Raises UserError if another job has
        taken the folder, before this one had a part."""
        if self.facts and self.facts != self._saved_facts():
            raise UserError(
                f"{self.folder} belongs to another prediction now: name another --output for one of them"
            )
        with self._writing(), replace_file(self._path(start, start + rows.num_rows)) as draft:
            if self.kind == ".parquet":
                import pyarrow.parquet

                for name, values in columns.items():
                    rows = rows.append_column(name, pyarrow.array(values))
                pyarrow.parquet.write_table(rows, draft)
                return
            try:
                with draft.open("w", encoding="utf-8", newline="") as file:
                    for line in self._lines(rows.to_pydict() | columns, header=start == 0):
                        line.encode(self.encoding)  # fail now, not when hours of parts are joined
                        file.write(line)
            except (UnicodeEncodeError, LookupError) as error:
                raise UserError(
                    f"--encoding {self.encoding} cannot write {self.output}: {error}; use utf-8"
                ) from error
            except csv.Error as error:
                why = "--quoting none cannot write a prediction that contains the delimiter"
                raise UserError(
                    f"{self.output}: {why}: name an --output that ends in .jsonl"
                ) from error

    def claim_joining(self) -> bool:
        """Returns True in one process only, of several that finish the last shards at the same time."""
        with contextlib.suppress(FileExistsError):
            self.joining.mkdir()
            return True
        return False

    def join(self, in_shards: bool) -> None:
        """Writes the output and removes the parts. Of a job in shards the folder stays, for `are_joined`."""
        if in_shards:
            self.joining.mkdir(exist_ok=True)
        parts = [self._path(start, end) for start, end in self.finished().items()]
        with self._writing(), replace_file(self.output) as draft:
            if self.kind == ".parquet":
                _join_parquet(parts, draft)
            else:
                opener = OPENERS.get(self.output.suffix.lower(), open)
                with opener(draft, "wt", encoding=self.encoding, newline="") as file:
                    file.writelines(self._joined_lines(parts))
        if not in_shards:
            shutil.rmtree(self.folder)
            return
        for part in parts:
            part.unlink()

    def _lines(self, columns: dict[str, list[Any]], header: bool) -> Iterator[str]:
        """The lines of a part in CSV, TSV or JSONL. Lists and objects are JSON in a cell, too; bytes are text."""
        rows = zip(*(
            [cell.decode(errors="backslashreplace") if isinstance(cell, bytes) else cell for cell in cells]
            for cells in columns.values()
        ), strict=True)  # fmt: skip
        if self.kind not in DELIMITERS:
            yield from (f"{dumps(dict(zip(columns, row, strict=True)))}\n" for row in rows)
            return
        written: list[str] = []
        sink: Any = SimpleNamespace(write=written.append)
        # csv quotes a cell with a lone \r, which readers take for the end of a row, only if lines end in \r, too
        writer = csv.writer(
            sink, delimiter=DELIMITERS[self.kind], lineterminator="\r\n", quoting=self.quoting,
            quotechar=None if self.quoting == csv.QUOTE_NONE else '"',
        )  # fmt: skip
        for row in itertools.chain([list(columns)] * header, rows):
            writer.writerow(
                [dumps(cell) if isinstance(cell, list | dict) else cell for cell in row]
            )
            yield f"{written.pop()[:-2]}\n"

    def _joined_lines(self, parts: list[Path]) -> Iterator[str]:
        """The lines of all parts, which for a JSON file become the items of a list."""
        before = "["
        for part in parts:
            with part.open(encoding="utf-8", newline="") as file:
                for line in file:
                    yield line if self.kind != ".json" else f"{before}{line.rstrip()}"
                    before = ","
        if self.kind == ".json":
            yield "]"

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return explain_write_errors(self.output, f"finished parts stay in {self.folder}")

    def _path(self, start: int, end: int) -> Path:
        return self.folder / f"part-{start:010d}-{end:010d}{self.kind}"


def _join_parquet(parts: list[Path], draft: Path) -> None:
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(parts[0])
    for part in parts[1:]:  # a column may be null in one part and hold lists in another
        schemas = [schema, pyarrow.parquet.read_schema(part)]
        schema = pyarrow.unify_schemas(schemas, promote_options="permissive")
    with pyarrow.parquet.ParquetWriter(draft, schema) as writer:
        for part in parts:
            for batch in pyarrow.parquet.ParquetFile(part).iter_batches():
                writer.write_table(cast_batch(batch, schema))
