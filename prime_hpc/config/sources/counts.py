"""Counts that follow from GPUs: `--inference-gpus 8`, or a list of GPU ids, says how many ranks or engines there are;
`--tp auto`, over how many of this machine's GPUs an engine's tensors are split.

Called once all sources are laid over each other, before the tree is checked.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from prime_hpc.config.errors import Origin, Problem
from prime_hpc.config.sections.inference import ENGINE_GPU_IDS
from prime_hpc.config.sources.interpolate import value_at

GPU_FLAGS = {
    "inference": "--inference-gpus",
    "teacher_inference": "--teacher-gpus",
    "judge_inference": "--judge-gpus",
}
"""Section of engines -> the flag that says how many GPUs its servers have in all."""
FACTORS = ("tensor_parallel_size", "pipeline_parallel_size", "num_replicas")
"""Keys of such a section among whose product its GPUs are divided."""
_ENGINES = ("data_parallel_size", "pipeline_parallel_size")
_IDS = {section: key for key, section in ENGINE_GPU_IDS.items()}
_NO_AUTO = (
    "auto is known of servers that have this machine to themselves (inference, eval, synthesize): state the GPUs of "
    "one engine; the number of engines follows from --inference-gpus"
)


def derive_tensor_parallel(
    values: dict[str, Any], provenance: dict[str, Origin], gpus: Callable[[], int] | None
) -> Iterator[Problem]:
    """Replace `inference.tensor_parallel_size: auto` by the GPUs that each engine gets; 1 on a machine without any.

    Args:
        values: the merged tree; changed.
        gpus: counts the GPUs of this machine; None: the servers may run elsewhere, or beside a trainer.

    Yields:
        what cannot be: a machine that is not known, GPUs that do not divide among engines.
    """
    engines, key = values.get("inference"), "inference.tensor_parallel_size"
    if not isinstance(engines, dict) or engines.get("tensor_parallel_size") != "auto":
        return
    count = _length(value_at(values, ("inference_gpu_ids",)))
    if not count and value_at(values, ("device",)) != "cpu" and gpus is not None:
        count = gpus()
    others = [_number(value_at(values, ("inference", name))) or 1 for name in (*_ENGINES, "num_replicas")]
    engines["tensor_parallel_size"] = max(1, count // math.prod(others))
    if gpus is None:
        yield Problem(_NO_AUTO, key, provenance.get(key))
    elif count % math.prod(others):
        yield Problem(f"auto: {count} GPUs do not divide among {math.prod(others)} parts", key, provenance.get(key))


def derive_counts(values: dict[str, Any], provenance: dict[str, Origin]) -> Iterator[Problem]:
    """Set `data_parallel_size` and `trainer.num_ranks` where GPUs are stated and they are not.

    Args:
        values: the merged tree; changed.
        provenance: where its values were stated; that of what is set is added.

    Yields:
        what cannot be: GPUs that do not divide among engines.
    """
    ids = _length(value_at(values, ("trainer_gpu_ids",)))
    trainer = values.get("trainer")
    if ids and (trainer is None or (isinstance(trainer, dict) and "num_ranks" not in trainer)):
        values["trainer"] = {**(trainer or {}), "num_ranks": ids}
        provenance["trainer.num_ranks"] = provenance.get("trainer_gpu_ids", Origin("default"))
    for section, flag in GPU_FLAGS.items():
        engines = values.get(section)
        if not isinstance(engines, dict):
            continue
        key = f"{section}.data_parallel_size"
        origin = provenance.get(key)
        ids = _length(value_at(values, (_IDS[section],)))
        if origin is not None and origin.source == "command line" and origin.where.replace("_", "-") == flag:
            count, said = _number(value_at(values, (section, "data_parallel_size"))), flag
        elif ids and "data_parallel_size" not in engines:
            count, said, origin = ids, _IDS[section], provenance.get(_IDS[section], Origin("default"))
        else:
            continue
        # a size may be another key's: `tensor_parallel_size: ${trainer.num_ranks}`
        sizes = {name: value_at(values, (section, name)) for name in FACTORS}
        tensors, stages, replicas = (1 if size is None else _number(size) for size in sizes.values())
        if count is None or tensors is None or stages is None or replicas is None or tensors * stages * replicas < 1:
            continue  # the check says what is wrong with them
        width = tensors * stages
        if count < 1 or count % (width * replicas):
            yield Problem(
                f"{count} GPUs do not divide among {replicas} servers whose engines take {width} each "
                f"({section}.tensor_parallel_size{' x pipeline_parallel_size' if stages > 1 else ''})",
                said.lstrip("-").replace("-", "_"),
                origin,
            )
            continue
        engines["data_parallel_size"] = count // (width * replicas)
        provenance[key] = origin


def _number(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else int(value)
    except (TypeError, ValueError):
        return None


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0
