"""`python -m hetero_operator`."""

from hetero_operator.main import run

run()
