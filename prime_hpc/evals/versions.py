"""Versions that are evaluated one after another: the base model, then those of a run."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.standalone_eval import StandaloneEvalConfig
from prime_hpc.store.manifest import MANIFEST
from prime_hpc.store.model.config import read_config
from prime_hpc.store.model.files import CHAT_TEMPLATE, is_classifier
from prime_hpc.store.run_paths import list_steps, step_name
from prime_hpc.store.weights import went_over_network

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Version:
    """One set of weights."""

    step: int
    """0 is the base model."""
    path: Path | None = None
    """Its directory; None: `model.name`."""

    @property
    def label(self) -> str:
        """For people."""
        return "base" if self.path is None else f"step {self.step}"

    @property
    def is_gone(self) -> bool:
        """True if its run has removed it: one that trains on keeps its newest ones alone."""
        return self.path is not None and not self.path.exists()


def weights_root(stated: Path) -> Path:
    """Return the directory of versions: as stated, or `weights` in the run that is stated."""
    return stated / "weights" if not list_steps(stated) and (stated / "weights").is_dir() else stated


def find_versions(config: StandaloneEvalConfig) -> list[Version]:
    """Return the versions that an evaluation asks for, in order; of all those whose weights are in files.
    Raises ConfigError: there is no such directory, step or version at all, or one went over the network alone."""
    if config.weights_dir is None:
        return [Version(0)]
    root = weights_root(config.weights_dir)
    if not root.is_dir():
        raise ConfigError(f"{config.weights_dir} is not a directory", "eval.weights_dir")
    folders = {step: root / step_name(step) for step in list_steps(root) if step > 0}
    steps = _with_weights(folders) if config.steps == "all" else list(config.steps)
    if config.steps != "all" and (
        missing := set(steps) - set(_with_weights({step: folders[step] for step in steps if step in folders}))
    ):
        first, there = min(missing), _with_weights(folders)
        shown = ", ".join(map(str, there[:20])) + (" ..." if len(there) > 20 else "")
        what = "only a version without weights, which went over the network, of" if first in folders else "no"
        raise ConfigError(f"{root} holds {what} step {first}; there are {shown or 'none'}", "eval.steps")
    if not steps and (config.steps == "all" or not config.eval_base):
        what = "only versions without weights, which went over the network" if folders else "no version"
        raise ConfigError(f"{root} holds {what} (step_000010, ...)", "eval.weights_dir")
    base = [Version(0)] if config.eval_base else []
    return base + [Version(step, folders[step]) for step in steps]


def versions_of(experiment: Experiment) -> list[Version]:
    """Return the versions that a run without a trainer plays. Raises ConfigError: as of `find_versions`."""
    return find_versions(experiment.eval) if experiment.kind == "eval" else [Version(0)]


def check_published(versions: list[Version]) -> None:
    """Check that the directories are versions as runs publish them, and reply: engines take no others, and would say so
    only when their turn comes. Raises ConfigError: one is not, or does not."""
    for version in versions:
        if version.path is not None and not (version.path / MANIFEST).is_file() and not version.is_gone:
            raise ConfigError(
                f"{version.path} is no version that a run has published: it holds no {MANIFEST}; evaluate a model of "
                "your own as --model.name, or leave it out with --steps",
                "eval.weights_dir",
            )
        if version.path is not None and is_classifier(read_config(str(version.path)) or {}):
            raise ConfigError(
                f"{version.path} is a reward model: it scores what it reads, and writes no reply to evaluate; its run "
                "scores held-out pairs (sft.eval), and judge_inference serves it",
                "eval.weights_dir",
            )


def _with_weights(folders: Mapping[int, Path]) -> list[int]:
    return [step for step, folder in folders.items() if not went_over_network(folder)]


def version_template(config: StandaloneEvalConfig) -> str | None:
    """Return the chat template that stands beside the versions, which the run may have been given for the model's:
    all that is compared, the base model too, is asked alike. None: they bring none."""
    for version in reversed(find_versions(config)):
        if version.path is not None:
            with contextlib.suppress(FileNotFoundError):  # none, or its run removes it now
                return (version.path / CHAT_TEMPLATE).read_text(encoding="utf-8")
    return None


def adapter_rank(versions: list[Version]) -> int | None:
    """Largest rank of the adapters among versions; None where they are whole models.
    Raises ConfigError: some are adapters and some are not, or an adapter's config cannot be read."""
    ranks, whole = [], []
    for version in versions:
        if version.path is None:
            continue
        if not (version.path / ADAPTER_CONFIG).is_file():
            whole.append(version)
            continue
        try:
            ranks.append(int(json.loads((version.path / ADAPTER_CONFIG).read_text(encoding="utf-8"))["r"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{version.path / ADAPTER_CONFIG}: no adapter's config ({error})"
            raise ConfigError(message, "eval.weights_dir") from error
    if ranks and whole:
        message = f"adapters and whole models side by side ({whole[0].path}): evaluate them apart, with --steps"
        raise ConfigError(message, "eval.weights_dir")
    return max(ranks, default=None)
