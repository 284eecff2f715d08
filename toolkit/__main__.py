"""`python -m toolkit`, for launchers that start modules: `torchrun -m toolkit predict ...`."""

from toolkit.cli import main

if __name__ == "__main__":
    main()
