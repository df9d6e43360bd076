"""Parts of an evaluation's config that follow from what is on disk: the model's context, its versions and their
adapters' rank.

Called before anything is checked, planned or written; other kinds pass through unchanged.
"""

import json
from dataclasses import replace

from prime_hpc.config import Loaded
from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.evals.versions import adapter_rank, find_versions
from prime_hpc.store.model_config import find_config


def for_evaluation(loaded: Loaded) -> Loaded:
    """Return the experiment with what follows from its files.

    `seq_len`, where nobody states it, is at most the model's own context; `model.lora` has the rank of the adapters in
    `eval.weights_dir`, so that the engines have room for them.

    Raises:
        ConfigError: versions that are asked for are not there.
    """
    experiment = loaded.experiment
    if experiment.trains:
        return loaded
    versions = find_versions(experiment.eval)
    changes: dict[str, object] = {}
    rank = adapter_rank(versions)
    if rank is not None and experiment.model.lora is None and experiment.eval.client is None:
        changes["model"] = experiment.model.model_copy(update={"lora": LoraConfig(rank=rank)})
    limit = _context(experiment.model.name)
    if "seq_len" not in loaded.provenance and limit is not None and limit < experiment.seq_len:
        changes["seq_len"] = limit
    if not changes:
        return loaded
    return replace(loaded, experiment=experiment.model_copy(update=changes))


def _context(name: str) -> int | None:
    """Longest sequence of a model whose config is on this machine."""
    path = find_config(name)
    if path is None:
        return None
    try:
        limit = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return limit if isinstance(limit, int) else None
