"""`toolkit convert`: any checkpoint into a folder that `from_pretrained` loads, streamed, without torch."""
