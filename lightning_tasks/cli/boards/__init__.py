"""What W&B is told of a project: sweeps and workspaces."""
