"""Going on with a run where it was."""
