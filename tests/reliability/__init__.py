"""Trials that take minutes to hours: docs/reliability.md says what each of them showed."""
