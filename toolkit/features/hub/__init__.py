"""`--push_to_hub`: uploads the saved model to the hub."""
