"""Publishing a weight version, all ranks at once, as an artifact that Hugging Face and vLLM load as it is.

With `model.lora` a version is the adapter alone (of a reward model all, merged), see `lora_files.AdapterPublisher`.
Else it is a safetensors file per rank, and every rank hands the rows that it holds of each tensor, with their places in
these files, to the transport (`weight_transport.transport`); one whose parts lie on several nodes, or are no whole
rows, comes to the rank whose file it stands in, which hands it over (`write_plan`, `gathering`). Then each rank seals
what it wrote. Rank 0 adds the index, config.json and the tokenizer of the source model (`aux_files`) to a version that
is whole, and commits.
"""

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Unpack

import torch

from prime_hpc.config.experiment import Experiment
from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.store.artifact import commit_stage, fenced_stage, prepare_stage, stage_dir
from prime_hpc.store.errors import NoRoom
from prime_hpc.store.io import files as store_files
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.io.room import takes
from prime_hpc.store.manifest import Manifest
from prime_hpc.store.model.files import INDEX
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.lora import Adapters
from prime_hpc.trainer.model.hf_checkpoint import local_box
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.model.score_head import padding_tokenizer
from prime_hpc.trainer.parallel.tensor import local
from prime_hpc.trainer.rank_group import RankGroup
from prime_hpc.trainer.slow_ranks import SlowRanks
from prime_hpc.trainer.weights.aux_files import AuxFiles, Content
from prime_hpc.trainer.weights.lora_files import AdapterPublisher, Names, own_template, version_manifest
from prime_hpc.trainer.weights.safetensors_layout import host_bytes
from prime_hpc.trainer.weights.write_plan import UNUSED_FILE, Block, plan_version
from prime_hpc.weight_transport.transport import Place, Sender, VersionForm, WholeFile, load_transport

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
MAX_PENDING_WRITES = 2
"""Tensors in host memory that wait to be written."""
_SKIPPED = {"config.json", "manifest.json", ".gitattributes", "README.md"}
Sealed = tuple[dict[str, FileEntry], dict[str, Any]]
"""A rank's files, and its facts for the manifest."""


def _is_never(version: int) -> bool:
    return False


def kept_versions(experiment: Experiment) -> Callable[[int], bool]:
    """Return which versions stay for as long as the run: those of the checkpoints that the config wants, and the last.

    Where `ckpt.interval` is `auto` nobody knows the steps before.
    """
    interval = experiment.ckpt.interval if experiment.ckpt is not None else None

    def is_kept(version: int) -> bool:
        is_saved = isinstance(interval, int) and version % interval == 0
        return is_saved or version == experiment.max_steps

    return is_kept


class VersionPublisher(Protocol):
    """Writes weight versions."""

    def publish(self, version: int) -> Manifest | None:
        """Write and commit `weights/step_<version>`; the manifest on rank 0. Collective."""


def build_publisher(
    policy: Policy,
    source: Path,
    paths: RunPaths,
    *,
    dtype: torch.dtype,
    slot: int = 0,
    weights: WeightsConfig | None = None,
    is_kept: Callable[[int], bool] = _is_never,
    slow_ranks: SlowRanks | None = None,
    **names: Unpack[Names],
) -> VersionPublisher:
    """Build the publisher that fits the policy; arguments as `Publisher`'s, and of a policy with adapters whose it
    is. A reward model is published whole: engines take no adapter of its head."""
    if policy.adapters is not None and not policy.scores:
        return AdapterPublisher(policy, source, paths, slot=slot, **names)
    return Publisher(
        policy, source, paths, dtype=dtype, weights=weights, is_kept=is_kept, slow_ranks=slow_ranks, **names
    )


class Publisher:
    """Writes weight versions of one policy. All methods are collective."""

    def __init__(
        self,
        policy: Policy,
        source: Path,
        paths: RunPaths,
        *,
        dtype: torch.dtype,
        weights: WeightsConfig | None = None,
        is_kept: Callable[[int], bool] = _is_never,
        slow_ranks: SlowRanks | None = None,
        **names: Unpack[Names],
    ) -> None:
        """Args:
        source: directory of the model that training began with (config, tokenizer).
        dtype: floating-point dtype of the published weights.
        weights: names the transport; default: whole files.
        is_kept: versions that stay for as long as the run, by its config.
        slow_ranks: hears what each version took.
        """
        self._policy, self._source, self.paths = policy, source, paths
        self._dtype, self._names, self.incarnation = dtype, names, names["incarnation"]
        self._ranks, self._slow_ranks, self._wrote = RankGroup(), slow_ranks, (0.0, 0)
        assert policy.weights is not None, "a policy from `load_policy`"
        weights = weights or WeightsConfig()
        transport = load_transport(weights.transport)
        gathers = getattr(transport, "gathers", False)
        if gathers and policy.weights.unused:
            raise ValueError(
                f"weights.transport = {weights.transport}: {source} holds tensors that the model does not use "
                f"({policy.weights.unused[0]}, {len(policy.weights.unused)} in all), which only files carry; use files"
            )
        self._plan = plan_version(dict(policy.named_weights()), policy.weights, dtype, gathers=gathers)
        self._aux_files = AuxFiles(self._aux_file_paths() if self._ranks.rank == 0 else {})
        self.sender: Sender = transport.sender(weights, self._written_files(), self._ranks.rank)
        self.is_kept = is_kept

    def publish(self, version: int) -> Manifest | None:
        """Write and commit `weights/step_<version>`; see `write`."""
        manifest = self.write(version, self.blocks(), self._ranks)
        self.tell_times()
        return manifest

    def tell_times(self) -> None:
        """Tell what the last version that is written took of this rank; all ranks do between the same two steps."""
        if self._slow_ranks is not None:
            self._slow_ranks.wrote(*self._wrote)

    def write(self, version: int, blocks: Iterator[Block], ranks: RankGroup) -> Manifest | None:
        """Make a version of what all ranks write.

        Args:
            blocks: as `blocks` has them, or copies.
            ranks: over which they talk about it.

        Returns:
            the manifest on rank 0, None elsewhere.

        Raises:
            StoreError: fenced, or other content has this name; on every rank.
            NoRoom: on every rank; it may be written again, with the same blocks.
            Exception: this rank could not gather (its device is full, another has gone); on this rank alone, at once.
        """
        stage = stage_dir(self.paths.weights_step(version), self.incarnation)
        blocks, form = _taken(blocks), VersionForm()
        try:
            form = self._open_stage(version, stage, ranks)
            with contextlib.ExitStack() as stack:
                beside = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="publish"))
                aux_files = beside.submit(self._put_aux_files, form, stage) if ranks.rank == 0 else None

                def write() -> None:
                    try:
                        with self._fenced(stage):
                            self.sender.open(form, stage, stack)
                            with _Writer(self.sender, form) as writer:
                                for block in blocks:
                                    writer.write(block)
                                writer.finish()
                        self._wrote = writer.seconds, writer.num_bytes
                    except Exception:
                        deque(blocks, maxlen=0)  # in taking them, other ranks' tensors are gathered
                        raise

                def seal() -> Sealed:
                    with self._fenced(stage):
                        began = time.perf_counter()
                        sealed = self.sender.finalize()
                        self._wrote = self._wrote[0] + time.perf_counter() - began, self._wrote[1]
                        return sealed

                def commit() -> Manifest:
                    assert gathered is not None and aux_files is not None
                    with self._fenced(stage):
                        return self._commit(version, form, gathered, aux_files.result())

                ranks.on_all(write)  # all ranks have written, before the first file is summed
                gathered = ranks.gather(ranks.on_all(seal))
                manifest = ranks.from_first(commit)
        except BaseException as error:
            if ranks.rank == 0:  # whatever ended this, nothing half-written stays behind
                store_files.clear_away(stage)
            if isinstance(error, _LeftGathering):
                raise error.cause from None
            if isinstance(error, NoRoom) and form.is_whole:
                raise takes(error, sum(file.layout.size for file in self._plan.files)) from error
            raise
        return manifest if ranks.rank == 0 else None

    def _fenced(self, stage: Path) -> contextlib.AbstractContextManager[None]:
        return fenced_stage(stage, self.paths, self.incarnation)

    def _open_stage(self, version: int, stage: Path, ranks: RankGroup) -> VersionForm:
        """Rank 0 makes the stage and decides the form; both are there for all when this returns. Collective."""

        def plan() -> VersionForm:
            final, file_bytes = self.paths.weights_step(version), self._plan.file_bytes
            prepare_stage(final, self.incarnation, run=self.paths, file_bytes=file_bytes)
            return self.sender.plan(version, is_kept=self.is_kept(version))

        form = ranks.from_first(plan)
        if int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)) < ranks.world_size:
            looks = ranks.rank != 0 and os.environ.get("LOCAL_RANK", "0") == "0"  # one rank of each node
            ranks.on_all(lambda: store_files.await_name(stage) if looks else None)
        return form

    def blocks(self) -> Iterator[Block]:
        """Return what this rank writes. Collective: every rank takes all of its own."""
        tensors = dict(self._policy.named_weights())
        return self._plan.blocks(tensors if self._policy.adapters is None else _Merged(tensors, self._policy.adapters))

    def _written_files(self) -> list[WholeFile]:
        return [
            WholeFile(file.name, file.layout.size, file.layout.header, file.owner == self._ranks.rank)
            for file in self._plan.mine()
        ]

    def _put_aux_files(self, form: VersionForm, stage: Path) -> dict[str, FileEntry]:
        """On rank 0: what lies beside the tensors of a whole version."""
        return self._aux_files.put(stage) if form.is_whole else {}

    def _commit(
        self, version: int, form: VersionForm, sealed: Sequence[Sealed], aux_files: Mapping[str, FileEntry]
    ) -> Manifest:
        """On rank 0: give a version its name, from what each rank sealed.
        Raises StoreError: disk full, fenced, or other content has this name."""
        final = self.paths.weights_step(version)
        parts = [*(entries for entries, _ in sealed), aux_files]
        files = {name: entry for part in parts for name, entry in part.items()}
        meta = {"dtype": str(self._dtype).removeprefix("torch."), **self.sender.meta([facts for _, facts in sealed])}
        manifest = version_manifest(version, self._names, files, **meta)
        manifest = commit_stage(stage_dir(final, self.incarnation), final, manifest, run=self.paths)
        self.sender.sent(manifest)
        if form.is_whole:
            self._aux_files.committed(final)
        return manifest

    def _aux_file_paths(self) -> dict[str, Content]:
        """config.json with the published dtype, the index, generation config, tokenizer, remote code, tensors that no
        step changes."""
        text = (self._source / "config.json").read_text(encoding="utf-8")
        config = dict(self._policy.reward_config or json.loads(text))
        config.pop("torch_dtype", None)
        config["dtype"] = str(self._dtype).removeprefix("torch.")
        found: dict[str, Content] = {"config.json": (json.dumps(config, indent=2) + "\n").encode()}
        if self._plan.is_indexed:
            found[INDEX] = json.dumps(self._plan.index(), indent=1).encode()
        for path in sorted(self._source.iterdir()):
            if path.is_file() and path.name not in _SKIPPED and not path.name.endswith(_WEIGHT_SUFFIXES):
                found[path.name] = path
        if self._policy.reward_config:
            found |= padding_tokenizer(self._source, self._policy.reward_config["pad_token_id"])
        found |= own_template(self._names)
        if self._plan.has_unused:
            found[UNUSED_FILE] = self._plan.unused_file
        return found


class _Merged(Mapping[str, torch.Tensor]):
    """A model's (sharded) tensors with the adapter in them, W + scale B A, rounded once: each as it is asked for, since
    all at once would take the model's memory again. To open it is collective."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], adapters: Adapters) -> None:
        self._tensors = tensors
        self._matrices = {f"{name}.weight": pair for name, pair in adapters.matrices(0).items()}

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._tensors[name]
        if name not in self._matrices:
            return weight
        (b, a), (rows, columns) = self._matrices[name], (slice(*ends) for ends in local_box(weight))
        whole = torch.empty_like(weight)
        local(whole).copy_(local(weight).float() + b[rows] @ a[:, columns])
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _LeftGathering(BaseException):
    """Not an Exception, of which `on_all` would tell: the other ranks are in the next round, not there to be told."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def _taken(blocks: Iterator[Block]) -> Iterator[Block]:
    """Return the blocks; a failure to gather them as `_LeftGathering`, unlike one to write them."""
    try:
        yield from blocks
    except Exception as error:
        raise _LeftGathering(error) from error


class _Writer:
    """Hands to the sender in a thread of its own: meanwhile the next tensor is cast and comes from the device.

    But what lies in host memory and is only to be compared goes to it at once, while it is in the cache: nothing waits
    for a disk or a device.
    """

    def __init__(self, sender: Sender, form: VersionForm) -> None:
        self._sender, self._form = sender, form
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._pending: deque[Future[None]] = deque()
        self.seconds, self.num_bytes = 0.0, 0
        """Of what was handed over. Also where changes alone are written: all values are compared."""

    def __enter__(self) -> "_Writer":
        return self

    def write(self, block: Block) -> None:
        place, content = block.place, host_bytes(block.published())
        if not self._form.is_whole and block.values.device.type == "cpu":
            self._send(place, content)
            return
        if len(self._pending) == MAX_PENDING_WRITES:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._send, place, content))

    def _send(self, place: Place, content: Any) -> None:
        began = time.perf_counter()
        self._sender.write(place, content)
        self.seconds, self.num_bytes = self.seconds + time.perf_counter() - began, self.num_bytes + len(content)

    def finish(self) -> None:
        while self._pending:
            self._pending.popleft().result()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
