"""The training loop: steps, loss normalisation, optimizer, schedule, precision."""
