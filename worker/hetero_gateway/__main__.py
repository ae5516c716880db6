"""`python -m hetero_gateway`."""

from hetero_gateway.server.app import run

if __name__ == "__main__":
    run()
