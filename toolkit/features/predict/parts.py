"""What `toolkit predict` has finished of a file: parts in a folder beside the output, which they become when all are
there."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from toolkit.data.read import format_of
from toolkit.data.table import cast_batch, unify_schemas
from toolkit.data.text_files import OPENERS
from toolkit.errors import UserError, listing
from toolkit.utils.cache import digest_of_file
from toolkit.utils.files import explain_write_errors, replace_file

SEPARATORS = {".csv": ",", ".tsv": "\t"}
_NAME = re.compile(r"part-(\d+)-(\d+)")


class Parts:
    """The folder OUTPUT.parts: manifest.json says what its parts are of; part-FIRST-END holds what the output has of
    these rows, counted from 0. Each is there whole or not at all."""

    def __init__(self, output: Path, encoding: str, unquoted: bool = False) -> None:
        """`unquoted`: of CSV and TSV files, as `--quoting none` reads them."""
        self.output, self.encoding, self.kind = output, encoding, format_of(output)
        self.quoting: Any = csv.QUOTE_NONE if unquoted else csv.QUOTE_MINIMAL
        self.folder = output.with_name(f"{output.name}.parts")
        self.manifest = self.folder / "manifest.json"

    def begin(self, facts: dict[str, Any], overwrite: bool) -> None:
        """Makes the folder, or continues one that is of the same. Raises UserError for one of something else."""
        before, joined = self._manifest()
        if joined and not self.done():  # of an output that is made again
            self.manifest.unlink(missing_ok=True)
            shutil.rmtree(self.folder / "joining", ignore_errors=True)
        elif before and (odd := [name for name in facts if facts[name] != before.get(name)]):
            if self.done() and not overwrite:
                raise UserError(
                    f"{self.folder} holds parts of another prediction (other: {listing(odd)}): repeat its options, "
                    "name another --output, or pass --overwrite to start over"
                )
            shutil.rmtree(self.folder)
        if not self.manifest.is_file():
            self._write_manifest(facts)

    def are_joined(self, facts: dict[str, Any]) -> bool:
        """Whether the output is there and whole, and was joined of shards of the same."""
        before, joined = self._manifest()
        return (
            before == facts and joined is not None and self.output.is_file() and digest_of_file(self.output) == joined
        )

    def _manifest(self) -> tuple[dict[str, Any], str | None]:
        """(what the parts are of, the digest of the output that shards were joined to)."""
        content = json.loads(self.manifest.read_text(encoding="utf-8")) if self.manifest.is_file() else {}
        joined = content.pop("joined", None)
        return content, joined

    def _write_manifest(self, content: dict[str, Any]) -> None:
        with self._writing(), replace_file(self.manifest) as draft:
            draft.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    def done(self) -> dict[int, int]:
        """First row -> end, in the order of the rows."""
        matches = (_NAME.fullmatch(path.stem) for path in self.folder.glob("part-*"))
        return dict(sorted((int(match[1]), int(match[2])) for match in matches if match))

    def missing(self, rows: int) -> list[str]:
        """`1 to 65536`: rows, counted from 1, of which there is no part."""
        gaps, at = [], 0
        for start, end in [*self.done().items(), (rows, rows)]:
            if start > at:
                gaps.append(f"{at + 1} to {start}")
            at = max(at, end)
        return gaps

    def write(self, start: int, rows: Any, columns: dict[str, list[Any]]) -> None:
        """Keeps a part: rows (an Arrow table) with what was predicted of each."""
        with self._writing(), replace_file(self._path(start, start + rows.num_rows)) as draft:
            if self.kind == ".parquet":
                import pyarrow.parquet

                for name, values in columns.items():
                    rows = rows.append_column(name, pyarrow.array(values))
                pyarrow.parquet.write_table(rows, draft)
                return
            frame = rows.to_pandas(integer_object_nulls=True).assign(**columns)
            if self.kind in SEPARATORS:
                text = self._separated(frame, header=start == 0)
            else:
                text = frame.to_json(orient="records", lines=True, force_ascii=False)
            self._refuse_unwritable(text)
            draft.write_text(text, encoding="utf-8", newline="")

    def take_joining(self) -> bool:
        """Whether this process, of those that finish the last shards at once, is the one to join them."""
        try:
            (self.folder / "joining").mkdir()
        except FileExistsError:
            return False
        return True

    def join(self, of_shards: bool) -> None:
        """Makes the output of the parts, and removes them. Of shards the manifest stays: one that a scheduler starts
        once more is to find that its work is done."""
        parts = [self._path(start, end) for start, end in self.done().items()]
        with self._writing(), replace_file(self.output) as draft:
            if self.kind == ".parquet":
                _join_parquet(parts, draft)
            else:
                with OPENERS.get(self.output.suffix.lower(), open)(
                    draft, "wt", encoding=self.encoding, newline=""
                ) as file:
                    for line in self._lines(parts):
                        file.write(line)
            if of_shards:
                self._write_manifest(self._manifest()[0] | {"joined": digest_of_file(draft)})
        if not of_shards:
            shutil.rmtree(self.folder)
            return
        for part in parts:
            part.unlink()

    def _lines(self, parts: list[Path]) -> Iterator[str]:
        """A JSON file is a list of the lines of a JSONL file."""
        before = "["
        for part in parts:
            with part.open(encoding="utf-8", newline="") as file:
                for line in file:
                    yield line if self.kind != ".json" else f"{before}{line.rstrip()}"
                    before = ","
        if self.kind == ".json":
            yield "]"

    def _writing(self) -> AbstractContextManager[None]:
        return explain_write_errors(self.output, f"what is finished is kept in {self.folder}")

    def _path(self, start: int, end: int) -> Path:
        return self.folder / f"part-{start:010d}-{end:010d}{self.kind}"

    def _separated(self, frame: Any, header: bool) -> str:
        try:
            return frame.to_csv(sep=SEPARATORS[self.kind], index=False, header=header, quoting=self.quoting)
        except csv.Error as error:
            raise UserError(
                f"{self.output}: a prediction holds its delimiter, which --quoting none cannot write: name an --output "
                "that ends in .jsonl"
            ) from error

    def _refuse_unwritable(self, text: str) -> None:
        """Now, not when hours of parts are joined."""
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise UserError(f"--encoding {self.encoding} cannot write {self.output}: {error}; use utf-8") from error


def _join_parquet(parts: list[Path], draft: Path) -> None:
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(parts[0])
    for part in parts[1:]:  # the first rows may have had no labels at all where others have lists
        schema = unify_schemas(schema, pyarrow.parquet.read_schema(part))
    with pyarrow.parquet.ParquetWriter(draft, schema) as writer:
        for part in parts:
            for batch in pyarrow.parquet.ParquetFile(part).iter_batches():
                writer.write_batch(cast_batch(batch, schema))
