"""The first process on each node in the site's container: it says that the image is there and holds prime-hpc.

    python -m prime_hpc.supervisor.preflight.image

Started by `images`, one process a node, before anything else runs in the container: a node that has no image yet
fetches it now, within the image's own deadline.
"""

import time

from prime_hpc.supervisor.preflight.node import local_hostnames, report_phase

if __name__ == "__main__":
    report_phase(local_hostnames()[0], "started", started=time.time())
