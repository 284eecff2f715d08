"""`toolkit doctor`: problems that keep a run from starting or working, on and between machines, and their remedies."""
