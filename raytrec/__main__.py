"""Entry point of `python -m raytrec`, which runs the command line."""

from raytrec.cli import main

main()
