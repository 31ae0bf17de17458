"""What monitors share: hooks, names of metrics, tables of heads, charts, warnings."""
