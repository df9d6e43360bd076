"""Versions as what changed, from two real ranks into real engines, against whole versions of the same weights."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from prime_hpc.cli.verbs.run import export
from prime_hpc.client.inference import Generation, InferenceClient, InferenceError
from prime_hpc.config import ConfigError
from prime_hpc.config.experiment import Experiment
from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.config.snapshot import write_snapshot
from prime_hpc.inference.check_version import BadVersionError
from prime_hpc.inference.transformers.engine import Engine
from prime_hpc.inference.transformers.model import BatchModel
from prime_hpc.inference.transformers.weight_updates import BatchPolicy
from prime_hpc.store.manifest import read_manifest
from prime_hpc.store.model.files import stored_tensors
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import holds_changes, list_versions
from prime_hpc.trainer.model.conversions import Piece, WeightMap
from prime_hpc.trainer.weights.publish import Publisher
from prime_hpc.trainer.weights.publish_async import BesidePublisher
from tests.support.inference_server import ServerProcess, hf_logprobs_of_all, save_model
from tests.support.published_policy import stand_in
from tests.support.ranks import spawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

VERSIONS = range(1, 8)
CHANGED = 0.03
PROMPT = list(range(5, 25))
TOLERANCE = 5e-5


class World(NamedTuple):
    """A model, and two runs with the same versions: as what changed, and whole."""

    base: Path
    delta: RunPaths
    whole: RunPaths


def publish(rank: int, store: str, root: Path) -> None:
    """Two ranks; the last three versions are written beside the changes of the next step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    mesh = init_device_mesh("cpu", (2,))
    stored = stored_tensors(root / "base")
    weights = WeightMap(stored, {name: [Piece.whole(name, tensor.shape)] for name, tensor in stored.items()})
    loaded = load_file(root / "base" / "model.safetensors")
    tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in loaded.items()}
    policy: Any = stand_in(lambda: list(tensors.items()), weights)
    for dtype in (torch.float32, torch.bfloat16):
        publishers = [
            Publisher(
                policy,
                root / "base",
                RunPaths(root / f"{transport}-{dtype.itemsize}"),
                dtype=dtype,
                incarnation=0,
                model_name="ours",
                weights=WeightsConfig(transport=transport, whole_interval=4),
            )
            for transport in ("delta", "files")
        ]
        beside = BesidePublisher(publishers[0], lambda manifest: None, timeout_s=60.0)
        generator = torch.Generator().manual_seed(rank)
        for version in VERSIONS:
            for tensor in tensors.values():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local += torch.randn(local.shape, generator=generator) * (
                    torch.rand(local.shape, generator=generator) < CHANGED
                )
            publishers[1].publish(version)
            if version < 5:
                publishers[0].publish(version)
                assert publishers[0]._wrote[1] == publishers[1]._wrote[1] > 0  # by which slow ranks are told
            else:
                beside.begin(version)
        beside.finish()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("delta")
    save_model(root / "base", tied=True, seed=0)
    spawn(publish, (str(root / "store"), root), 2)
    return World(root / "base", RunPaths(root / "delta-4"), RunPaths(root / "files-4"))


def content(folder: Path) -> dict[str, bytes]:
    """All that Hugging Face reads."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def test_what_changed_leads_to_the_whole_version_byte_by_byte(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for bits in ("2", "4"):
        delta, whole = (RunPaths(world.base.parent / f"{name}-{bits}") for name in ("delta", "files"))
        assert list_versions(delta) == list(VERSIONS)
        assert [v for v in VERSIONS if not holds_changes(delta.weights_step(v))] == [1, 2, 6]
        tree = {"name": delta.root.name, "output_dir": str(delta.root.parent), "model": {"name": str(world.base)}}
        write_snapshot(Experiment.model_validate(tree), delta.root, ["test"])
        for version in (3, 5, 7):
            found = tmp_path / f"{bits}-{version}"
            argv = [str(delta.root), "--merged", str(version), "--output", str(found)]
            assert export.run(argv, "prime-hpc") == 0
            assert content(found) == content(whole.weights_step(version))
            sizes = [read_manifest(run.weights_step(version)).total_size for run in (delta, whole)]
            assert sizes[0] < 0.06 * sizes[1]
        with pytest.raises(ConfigError, match="exists: name another directory"):
            export.run(argv, "prime-hpc")
        with pytest.raises(ConfigError, match="is a model directory as it is"):
            export.run([str(delta.root), "--merged", "6"], "prime-hpc")


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    model = BatchModel(
        str(world.base), dtype=torch.float32, device=torch.device("cpu"), max_len=64, cache_gib=0.05, max_rows=4
    )
    engine = Engine(model, seed=0)
    engine.start()
    yield engine
    engine.stop(30)


def test_the_transformers_backend_follows_them(world: World, engine: Engine, tmp_path: Path) -> None:
    async def go() -> None:
        policy = BatchPolicy(engine, str(world.base), world.base, tmp_path / "scratch")
        for version in (1, 2, 3, 6, 7, 4):  # whole, missed two, then back
            answer = await policy.update(str(world.delta.weights_step(version)), version, "policy")
            assert answer["version"] == version and answer["path"] == str(world.delta.weights_step(version))
            expected = load_file_all(world.whole.weights_step(version))
            own = engine.model.hf.state_dict()
            assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
        (world.delta.weights_step(3) / "manifest.json").rename(tmp_path / "kept")
        again = BatchPolicy(engine, str(world.base), world.base, tmp_path / "restarted")
        with pytest.raises(BadVersionError, match="step_000003.*step_000004 holds only what changed"):
            await again.update(str(world.delta.weights_step(4)), 4, "policy")
        (tmp_path / "kept").rename(world.delta.weights_step(3) / "manifest.json")
        await again.update(str(world.delta.weights_step(5)), 5, "policy")
        await again.reload("policy")
        assert again.version == 0 and engine.failure is None

    asyncio.run(go())


def load_file_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.exhaustive
def test_vllms_engines_follow_them(world: World, tmp_path: Path) -> None:
    """Two engines behind one server share what it fetched; a server that begins in the middle has it too."""
    first = ServerProcess(tmp_path / "first", world.base, {"data_parallel_size": 2})
    second = ServerProcess(tmp_path / "second", world.base)
    try:
        first.wait_ready()
        for version in (1, 2, 3, 4, 7, 5):
            asyncio.run(serve(first, world, version))
        second.wait_ready()
        asyncio.run(serve(second, world, 5))
        scratch = list(first.temporary.glob("**/weights/image/model-*.safetensors"))
        assert len(scratch) == 2
    finally:
        first.close()
        second.close()
    assert not list(first.temporary.glob("**/image"))


async def serve(server: ServerProcess, world: World, version: int) -> None:
    """Update, and compare what both engines sample with the whole version."""
    async with InferenceClient(server.url, api_key=server.key, timeout_s=120) as client:
        if version == 7:
            with pytest.raises(InferenceError, match="400"):
                await client.update_weights(world.delta.weights_step(8), 8)
        answer = await client.update_weights(world.delta.weights_step(version), version)
        assert answer["changed"]
        greedy = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        found: list[Generation] = await asyncio.gather(*(client.generate(PROMPT, greedy) for _ in range(6)))
    for generation in found:
        completion = generation.token_ids.tolist()
        every = hf_logprobs_of_all(world.whole.weights_step(version), PROMPT, completion)
        own = every[torch.arange(len(completion)), completion]
        np.testing.assert_allclose(generation.logprobs, own, atol=TOLERANCE, rtol=0)
        assert (generation.versions == version).all()
