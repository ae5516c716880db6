"""`python -m hetero_operator`. Until its loop runs there is nothing to end in order: a stop signal ends it at once."""

from hetero_api.contract import EXIT_OK
from hetero_api.host.stop_signals import end_on_stop_signals

if __name__ == "__main__":
    end_on_stop_signals(lambda _: EXIT_OK)
    from hetero_operator.main import run

    run()
