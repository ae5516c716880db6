"""python -m hetero_worker"""

from hetero_worker.rank import run

if __name__ == "__main__":
    run()
