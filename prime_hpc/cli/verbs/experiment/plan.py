"""`prime-hpc plan FILE`: where each role would run, in a Slurm job or on this machine; `--rehearse`: in what memory;
`--when`: when it would start, and in which shape first.

Exit codes: 0 said, 2 wrong config, 3 (`--when`) Slurm names a start for no shape.
"""

from typing import TYPE_CHECKING, Any

from prime_hpc.cli.common import Given, load, parse
from prime_hpc.config.errors import ConfigError

if TYPE_CHECKING:
    from prime_hpc.config import Experiment, Loaded
    from prime_hpc.launch.plan.plan import Plan
    from prime_hpc.launch.plan.when import StepOf

GPU_MEMORY = "--gpu-memory-gib"


def run(argv: list[str], program: str) -> int:
    """Print the plan."""
    given = parse("plan", argv)
    gpu_gib = given.positive(GPU_MEMORY, "GiB")
    if gpu_gib is not None and "--rehearse" not in given:
        raise ConfigError(f"{GPU_MEMORY} belongs to --rehearse")
    timeout_s = given.positive("--timeout")
    if timeout_s is not None and "--when" not in given:
        raise ConfigError("--timeout belongs to --when")
    if given.every("--from") and "--when" not in given:
        raise ConfigError("--from belongs to --when")
    loaded = load(given.words, "plan", program)
    if "--when" in given:
        return _when(given, loaded, timeout_s)
    from prime_hpc.launch.plan.plan import make_plan
    from prime_hpc.launch.plan.plan_text import plan_text

    plan = make_plan(loaded.experiment)
    rehearsal = _rehearse(loaded.experiment, plan, gpu_gib) if "--rehearse" in given else None
    more, text = ({}, "") if rehearsal is None else ({"rehearsal": rehearsal[0]}, rehearsal[1])
    given.tell(lambda: plan.as_dict() | more, lambda: plan_text(plan) + text)
    return 0


def _when(given: Given, loaded: "Loaded", timeout_s: float | None) -> int:
    """Print when each shape would start."""
    from prime_hpc.launch.plan.when import ask_when, refuse_without_slurm
    from prime_hpc.slurm.client import ASK_TIMEOUT_S
    from prime_hpc.slurm.sbatch_errors import SlurmRefused

    if "--rehearse" in given:
        raise ConfigError("--rehearse and --when are two questions: ask one after the other")
    refuse_without_slurm(loaded.experiment, "--when")
    words, loaded, step_of, notes = known_of_shapes(given, loaded)
    ranking = ask_when(words, loaded, timeout_s=timeout_s or ASK_TIMEOUT_S, step_of=step_of, notes=notes)
    given.tell(ranking.as_dict, ranking.text)
    return 0 if ranking.best is not None else SlurmRefused.exit_code


def known_of_shapes(given: Given, loaded: "Loaded") -> "tuple[list[str], Loaded, StepOf | None, list[str]]":
    """Return what `ask_when` is asked: the command line with its shapes, how their steps are predicted, and notes.
    Raises ConfigError: `slurm.shapes: auto` of an experiment that has no other shapes; a run of --from tells nothing.
    """
    from prime_hpc.simulate.auto_shapes import derive_shapes
    from prime_hpc.simulate.step_times import find_predictor

    derived = derive_shapes(given.words, loaded)
    notes = [f"left out: {shape}" for shape in derived.left_out]
    stated = derived.loaded.experiment.slurm.shapes
    if stated and all(not isinstance(shape, str) and shape.step_s is not None for shape in stated):
        return derived.words, derived.loaded, None, notes  # nothing is left to simulate
    found = find_predictor(loaded.experiment, given.every("--from"))
    if isinstance(found, str):
        return derived.words, derived.loaded, None, [*notes, found]
    return derived.words, derived.loaded, found, [*notes, *found.notes(loaded.experiment)]


def _rehearse(experiment: "Experiment", plan: "Plan", gpu_gib: float | None) -> tuple[dict[str, Any], str]:
    """Return the rehearsal of a plan, for JSON and for people; `experiment`: as it is stated."""
    from prime_hpc.launch.estimate.micro_batch import largest_for
    from prime_hpc.launch.rehearse import rehearsal_text, rehearse

    gpu_gib = gpu_gib or plan.memory.gpu_gib.get("trainer")
    rehearsal = rehearse(plan.experiment, gpu_gib)
    larger = largest_for(experiment, gpu_gib) if plan.micro_batch is None else None
    if larger is not None and larger.tokens > plan.experiment.micro_batch_tokens:
        rehearsal["notes"].append(
            f"by the estimate {larger.tokens} tokens would fit {larger.gpu_gib:g} GiB: gpu_memory_gib in the site "
            "profile makes them the default, trainer.micro_batch_tokens states them"
        )
    return rehearsal, rehearsal_text(plan.experiment, rehearsal)
