"""The command line: `prime-hpc VERB`, and the entrypoints `rl`, `sft`, `trainer`, `orchestrator` and `inference`."""

from prime_hpc.cli.entrypoints import ROLES, VERBS, inference, main, orchestrator, rl, sft, trainer

__all__ = ["ROLES", "VERBS", "inference", "main", "orchestrator", "rl", "sft", "trainer"]
