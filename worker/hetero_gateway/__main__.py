"""`python -m hetero_gateway`. Until it listens there is nothing to drain: a stop signal ends it at once."""

import gc
import sys

from hetero_api.contract import EXIT_OK
from hetero_api.host.stop_signals import end_on_stop_signals

if __name__ == "__main__":
    end_on_stop_signals(lambda _: EXIT_OK)
    if sys.argv[1:2] == ["respond"]:
        # By itself: a gateway's modules are many times the memory.
        from hetero_gateway import responder

        responder.run(sys.argv[2:])
    elif sys.argv[1:2] == ["route"]:
        # Needs the extra heteroinference[router].
        from hetero_gateway import smg

        smg.run(sys.argv[2:])
    else:
        gc.disable()  # imports create much and free nothing; `serving` turns it on again
        from hetero_gateway.server.app import run

        run()
