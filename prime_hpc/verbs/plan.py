"""`prime-hpc plan FILE`: where each role would run, in a Slurm job or on this machine."""

from prime_hpc.verbs.common import load, print_json, take_flags


def run(argv: list[str], program: str) -> int:
    """Print the plan."""
    rest, given, _ = take_flags(argv, ("--json",))
    loaded = load(rest, "plan", program)
    from prime_hpc.launch import plan_text
    from prime_hpc.launch.plan import resolve_launch

    experiment = loaded.experiment
    if resolve_launch(experiment) == "local":
        text = plan_text(loaded).rstrip("\n")
        if "--json" in given:
            print_json({"launch": "local", "name": experiment.name, "kind": experiment.kind, "text": text.splitlines()})
        else:
            print(text)
        return 0
    from prime_hpc.config.site import load_site
    from prime_hpc.launch.plan_slurm import slurm_plan, slurm_plan_text

    plan = slurm_plan(experiment, load_site(experiment.slurm.site))
    if "--json" in given:
        print_json(plan)
    else:
        print(slurm_plan_text(experiment, plan), end="")
    return 0
