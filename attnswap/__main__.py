"""The command `attnswap`, also as `python -m attnswap`; what it needs is in the extra [train]."""

import sys


def main() -> None:
    """Run the command line of this process.

    Raises:
        SystemExit: as :func:`lightning_tasks.__main__.main`; with code 2 where the extra is not installed.
    """
    try:
        from lightning_tasks.__main__ import main as run
    except ModuleNotFoundError as error:
        print(f"attnswap: error: {error}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
