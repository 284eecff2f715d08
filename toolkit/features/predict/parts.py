"""The finished parts of a prediction, in a folder next to its output, until they are joined."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, listing
from toolkit.utils.files import explain_write_errors, replace_file

_FACTS = b"prediction"


class Parts:
    """The folder OUTPUT.parts. Each file has the predictions of a window's rows, without the
    columns of the input, and the facts that identify the prediction: a part of another model, file
    or set of options is never joined, wherever it was copied from."""

    def __init__(self, output: Path, facts: dict[str, Any]) -> None:
        """`facts` identify the prediction (JSON)."""
        self.output = output
        self.facts = facts
        self.folder = output.with_name(f"{output.name}.parts")

    def open(self, overwrite: bool) -> dict[str, int]:
        """Creates the folder, and returns the rows of each part in it, by file name. Raises
        UserError for a part of another prediction; with `overwrite` it is removed."""
        import pyarrow.parquet

        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
        rows = {}
        for path in sorted(self.folder.glob("part-*.parquet")):
            file = pyarrow.parquet.read_metadata(path)
            facts = json.loads(file.metadata[_FACTS])
            differing = [name for name in self.facts if self.facts[name] != facts.get(name)]
            if not differing:
                rows[path.name] = file.num_rows
            elif overwrite:
                path.unlink()
            else:
                why = f"is of another prediction (it differs in {listing(differing)})"
                remedy = "repeat its options, name another --output, or pass --overwrite"
                raise UserError(f"{path} {why}: {remedy}")
        return rows

    def write(self, name: str, columns: dict[str, list[Any]]) -> None:
        import pyarrow.parquet

        table = pyarrow.table(columns).replace_schema_metadata(
            {_FACTS: json.dumps(self.facts)}
        )
        with self.writing(), replace_file(self.folder / name) as draft:
            pyarrow.parquet.write_table(table, draft)

    def schema(self) -> Any:
        """The types of all parts: a column may be null in one, and hold lists in another."""
        import pyarrow.parquet

        paths = self.folder.glob("part-*.parquet")
        schemas = [pyarrow.parquet.read_schema(path) for path in paths]
        return pyarrow.unify_schemas(schemas, promote_options="permissive")

    def read(self, name: str) -> Any:
        """The pyarrow table of a part."""
        import pyarrow.parquet

        return pyarrow.parquet.read_table(self.folder / name)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Explains an error of the disk within it."""
        return explain_write_errors(self.output, f"finished parts stay in {self.folder}")

    def remove(self) -> None:
        shutil.rmtree(self.folder)
