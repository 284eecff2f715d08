"""What a run reports: log lines, run files, trackers, report.html and the model card."""
