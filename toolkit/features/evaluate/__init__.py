"""A saved model, judged on labelled rows."""
