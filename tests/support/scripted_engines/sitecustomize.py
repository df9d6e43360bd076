"""On PYTHONPATH, a job's inference servers are scripted ones: a real job without the minutes that vLLM takes to start.

Nothing else is changed: the supervisor, its agents and srun start `python -m prime_hpc.inference.main` as ever.
"""

import sys

if "prime_hpc.inference.main" in sys.orig_argv:
    from tests.support.scripted_engine import main

    main(sys.orig_argv[sys.orig_argv.index("prime_hpc.inference.main") + 1 :])
    sys.exit(0)
