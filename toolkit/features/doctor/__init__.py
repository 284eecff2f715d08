"""`toolkit doctor`: what will keep a run from starting or working, here and between machines, and what to type."""
