"""`--teacher`: a fine-tuned model's outputs as second targets of a smaller one."""
