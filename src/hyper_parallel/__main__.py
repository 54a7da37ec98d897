"""`python -m hyper_parallel` is the `hyper-parallel` command."""

from hyper_parallel.cli import main

if __name__ == "__main__":
    main()
