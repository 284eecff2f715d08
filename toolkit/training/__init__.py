"""The loop, the loss normalisation, optimizer and schedule."""
