"""Which of several runs is better."""
