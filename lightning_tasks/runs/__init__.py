"""What the folder of a run holds: each kind of file has its writer beside its reader."""
