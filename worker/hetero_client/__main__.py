"""`python -m hetero_client`: the `hetero` command."""

from hetero_client.cli.main import run

if __name__ == "__main__":
    run()
