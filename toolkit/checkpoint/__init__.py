"""What a run leaves on disk to load again."""
