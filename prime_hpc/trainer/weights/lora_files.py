"""An adapter on disk in PEFT's format, which Hugging Face's peft and vLLM load as it is.

adapter_config.json          rank, alpha, targets, name of the base model
adapter_model.safetensors    float32, base_model.model.<module>.lora_{A,B}.weight
tokenizer files              of the base model
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, Unpack

import torch
from safetensors.torch import load_file

from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.store.artifact import commit_stage, fenced_stage, prepare_stage, stage_dir
from prime_hpc.store.io import files as store_files
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import Manifest
from prime_hpc.store.model.files import CHAT_TEMPLATE
from prime_hpc.store.model.fingerprint import weights_fingerprint
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.rank_group import RankGroup
from prime_hpc.trainer.weights.aux_files import AuxFiles
from prime_hpc.trainer.weights.safetensors_layout import write_tensors

if TYPE_CHECKING:
    from prime_hpc.trainer.model.policy import Policy

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_TOKENIZER = ("tokenizer", "special_tokens_map", "vocab", "merges", "chat_template", "added_tokens")


def adapter_identity(config: LoraConfig, source: Path) -> dict[str, Any]:
    """Return what must be the same for an adapter's checkpoint to be of use, as plain JSON."""
    return config.model_dump(mode="json") | {"base weights": weights_fingerprint(source)}


def peft_config(config: LoraConfig, modules: list[str], linears: list[str], base: str) -> dict[str, Any]:
    """Fields of adapter_config.json.

    Args:
        modules: full names of the adapted modules.
        linears: full names of all linear modules.
    """
    names = sorted({m.rsplit(".", 1)[-1] for m in modules})
    everywhere = {m for m in linears if m.rsplit(".", 1)[-1] in names} == set(modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0,
        "use_rslora": config.rslora,
        "target_modules": names if everywhere else sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of an adapter under PEFT's names. Raises ValueError: the folder holds no adapter."""
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder} holds no adapter: {WEIGHTS_FILE} is missing")
    return load_file(folder / WEIGHTS_FILE)


def tokenizer_files(source: Path) -> dict[str, Path | bytes]:
    """Name to file of the tokenizer that lies in a model's directory."""
    found = (path for path in sorted(source.iterdir()) if path.name.startswith(_TOKENIZER))
    return {path.name: path for path in found if path.is_file() and path.suffix != ".safetensors"}


class Names(TypedDict):
    """Facts of a run that its versions carry."""

    incarnation: int
    model_name: str
    """Of the (base) model, for the manifest and for PEFT."""
    chat_template: NotRequired[str | None]
    """The one that the run trains with, in the place of the model's."""


def own_template(names: Names) -> dict[str, Path | bytes]:
    """Return the file of the run's own chat template, where it has one."""
    template = names.get("chat_template")
    return {} if template is None else {CHAT_TEMPLATE: template.encode()}


def version_manifest(version: int, names: Names, files: dict[str, FileEntry], **meta: Any) -> Manifest:
    """Return the manifest of a version. `meta`: besides the model's name."""
    meta = {"model": names["model_name"], **meta}
    return Manifest("weights", version, version, "trainer", names["incarnation"], files, meta)


class AdapterPublisher:
    """Writes the versions of one slot of a policy. All methods are collective."""

    def __init__(
        self,
        policy: "Policy",
        source: Path,
        paths: RunPaths,
        *,
        slot: int = 0,
        **names: Unpack[Names],
    ) -> None:
        """Args:
        policy: with adapters.
        slot: whose adapter.
        """
        assert policy.adapters is not None
        adapters, self._ranks = policy.adapters, RankGroup()
        self._adapters, self._paths, self._slot = adapters, paths, slot
        self._names, self._incarnation, model_name = names, names["incarnation"], names["model_name"]
        linears = [name for name, m in policy.hf.named_modules() if isinstance(m, torch.nn.Linear)]
        base = str(source.resolve()) if Path(model_name).expanduser().is_dir() else model_name
        config = peft_config(adapters.config_of(slot), adapters.modules, linears, base)
        content = (json.dumps(config, indent=2) + "\n").encode()
        self._rank_of_adapter = config["r"]
        self._aux_files = AuxFiles({CONFIG_FILE: content, **tokenizer_files(source), **own_template(names)})

    def publish(self, version: int) -> Manifest | None:
        """Write and commit `weights/step_<version>`. Returns the manifest on rank 0, None elsewhere.
        Raises StoreError: disk full, fenced, or other content has this name; on every rank."""
        tensors = self._adapters.weights(self._slot)
        manifest = self._ranks.from_first(lambda: self._write(version, tensors))
        return manifest if self._ranks.rank == 0 else None

    def _write(self, version: int, tensors: dict[str, torch.Tensor]) -> Manifest:
        final = self._paths.weights_step(version)
        stage = stage_dir(final, self._incarnation)
        try:
            with fenced_stage(stage, self._paths, self._incarnation):
                prepare_stage(final, self._incarnation, run=self._paths)
                entry = write_tensors(stage / WEIGHTS_FILE, tensors)
                files = {WEIGHTS_FILE: entry} | self._aux_files.put(stage)
                meta = {"dtype": "float32", "format": "lora", "rank": self._rank_of_adapter}
                manifest = version_manifest(version, self._names, files, **meta)
                manifest = commit_stage(stage, final, manifest, run=self._paths)
                self._aux_files.committed(final)
                return manifest
        except BaseException:  # whatever ended this, nothing half-written stays behind
            store_files.clear_away(stage)
            raise
