"""Python's garbage collector in processes that live for hours with a large heap of modules.

Called by `orchestrator.main` and `inference` once they are ready to work.
"""

import gc

YOUNGEST = 20_000
"""New container objects between two collections of the youngest generation (Python's own default: 700)."""


def settle_heap() -> None:
    """Everything alive now stays: never look at it again, and look for garbage among newer objects less often.

    Reference counts free nearly everything; what is left are cycles of a few kB an episode. With Python's defaults a
    process behind verifiers or vLLM walks through some hundred thousand objects of imported modules again and again: a
    quarter of the orchestrator's CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNGEST, 10, 10)
