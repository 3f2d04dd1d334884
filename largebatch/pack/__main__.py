"""Runs `python -m largebatch.pack`; see `command_line`."""

from largebatch.pack.command_line import main

if __name__ == "__main__":
    raise SystemExit(main())
