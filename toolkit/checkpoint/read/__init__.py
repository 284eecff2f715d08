"""Opening what others and we have saved: structure only, nothing executed, no torch."""
