"""Files or hub -> checked columns -> tokens -> batches. Each noun has a file:

- `Table` (table.py): rows of files or of a data set, from `read.py`; `columns.py` finds what is
  read and what is predicted.
- `Samples` (select.py): the rows of a split that take part, with their targets (`targets.py`,
  `labels.py`).
- `Data` (prepare.py): its `Split`s (tokens.py) are tokenized (`encode.py`) once per machine, and
  memory-mapped from the cache (`token_files.py`).
- `Batch` (batches.py): what the model gets."""
