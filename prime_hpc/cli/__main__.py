"""`python -m prime_hpc.cli`: the command line without its installed script."""

import sys

from prime_hpc.cli.entrypoints import main

sys.exit(main())
