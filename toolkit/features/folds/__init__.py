"""Wrong labels, found by models that did not see them."""
