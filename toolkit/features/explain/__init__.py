"""Attribution of predictions to words."""
