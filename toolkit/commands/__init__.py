"""One file for each `toolkit` command of the core."""
