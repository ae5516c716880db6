"""python -m hetero_worker"""

from hetero_worker.process.rank import run

if __name__ == "__main__":
    run()
