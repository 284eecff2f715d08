"""Files or hub -> checked columns -> tokens -> batches."""
