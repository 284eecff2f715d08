"""`--padding_free`: the texts of a micro-batch end to end in one row, without padding."""
