"""`python -m service`: the same as `distill`."""

from service.cli import main

if __name__ == "__main__":
    main()
