"""What a job takes of the memory."""
