"""`python -m largebatch.pack`; see `packing`."""

from largebatch.pack.packing import main

if __name__ == "__main__":
    raise SystemExit(main())
