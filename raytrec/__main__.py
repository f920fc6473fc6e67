"""`python -m raytrec`: the command line."""

from raytrec.cli import main

main()
