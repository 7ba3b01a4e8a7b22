"""`python -m flops`."""

from flops.cli.main import main

main()
