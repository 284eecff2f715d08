"""What a run tells: progress, files, trackers, report and model card."""
