"""`python -m flops`."""

from flops.cli import main

main()
