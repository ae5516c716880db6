"""`python -m hetero_worker.pod`.

In a container this is the first process, which never gets a signal that it has no handler for: the kernel drops it. So
the handlers are set before the imports, which take a while, and a pod that is deleted meanwhile ends at once.
"""

import os
import sys

from hetero_api.host.stop_signals import StopSignals

if __name__ == "__main__":
    with StopSignals() as signals:
        from hetero_worker.pod.supervisor import main

        sys.exit(main(sys.argv[1:], os.environ, signals))
