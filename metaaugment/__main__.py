"""`python -m metaaugment` is the same program as `metaaugment`, in the form torchrun needs."""

from metaaugment.cli import main

main()
