"""`python -m hetero_operator`. Before its loop runs there is nothing to stop in order: a stop signal ends it."""

from hetero_api.contract import EXIT_OK
from hetero_api.host.stop_signals import end_on_stop_signals

if __name__ == "__main__":
    end_on_stop_signals(lambda _: EXIT_OK)
    from hetero_operator.main import run

    run()
