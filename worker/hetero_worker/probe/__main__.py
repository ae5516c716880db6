"""`python -m hetero_worker.probe`: measure one rank's device, and exit."""

from hetero_worker.probe.program import run

if __name__ == "__main__":
    run()
