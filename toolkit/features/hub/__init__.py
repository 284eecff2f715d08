"""`--push_to_hub`: the saved model in a repository of the hub."""
