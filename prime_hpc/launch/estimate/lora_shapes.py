"""`model.lora` against the shapes of the model's stored weights.

Reads the headers of the safetensors alone: neither torch nor transformers is loaded.
"""

from collections.abc import Mapping

from prime_hpc.config import Experiment, Problem
from prime_hpc.config.sections.lora import HEADS, select_modules
from prime_hpc.launch.estimate.memory import stored_shapes
from prime_hpc.store.model_config import find_config


def linear_modules(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of the modules that an adapter may be put on: matrices outside token tables and experts (which
    the trainer holds stacked).

    Args:
        shapes: of a model's stored tensors.
    """
    found = {n.removesuffix(".weight"): s for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2}
    return {n: (s[0], s[1]) for n, s in found.items() if n.rsplit(".", 1)[-1] not in HEADS and ".experts." not in n}


def adapter_problems(experiment: Experiment) -> list[Problem]:
    """Targets that match nothing, and a rank that exceeds a target's dimensions; [] where there are no adapters, or the
    weights are not here to be looked at."""
    lora, config = experiment.model.lora, find_config(experiment.model.name)
    shapes = stored_shapes(config.parent) if lora is not None and config is not None else None
    if lora is None or shapes is None:
        return []
    modules = linear_modules(shapes)
    try:
        chosen = select_modules(lora, list(modules))
    except ValueError as error:
        return [Problem(str(error).removeprefix("model.lora.target_modules: "), "model.lora.target_modules")]
    narrow = min(chosen, key=lambda name: min(modules[name]))
    if lora.rank > min(modules[narrow]):
        shape = " x ".join(map(str, modules[narrow]))
        return [Problem(f"{lora.rank} exceeds {narrow}, which is {shape}: lower it", "model.lora.rank")]
    return []
