"""Opens checkpoints of any format: reads their structure, executes nothing, imports no torch."""
