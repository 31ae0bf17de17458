"""The whole program of a project that has LightningCLI and YAML."""

from lightning.pytorch.cli import LightningCLI
from own_project import Letters, Reader

if __name__ == "__main__":
    LightningCLI(Reader, Letters)
