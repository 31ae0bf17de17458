"""Monitors, regularizers and stabilizers in trainers that are none of Lightning's."""
