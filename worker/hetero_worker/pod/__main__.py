"""`python -m hetero_worker.pod`."""

from hetero_worker.pod.app import run

if __name__ == "__main__":
    run()
