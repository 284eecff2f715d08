"""`toolkit doctor`: problems that keep a run from starting, on and between machines, and their
remedies."""
