"""`prime-hpc plan FILE`: where each role would run."""

from prime_hpc.verbs.common import load


def run(argv: list[str], program: str) -> int:
    """Print the plan."""
    from prime_hpc.launch import plan_text

    print(plan_text(load(argv, "plan", program)).rstrip("\n"))
    return 0
