"""Flags of other programs by hand: torchrun's on trainer and sft, vLLM's variables, keys that other trainers have."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli import entrypoints as cli
from prime_hpc.config import ConfigError, load_experiment
from prime_hpc.launch.by_hand import Nodes, ranks_of_all
from prime_hpc.store.checkpoint import newest
from prime_hpc.store.checkpoint.failed_reads import FailedReads, list_failed_reads, record_failed_read
from prime_hpc.store.errors import ArtifactError, StoreError
from prime_hpc.store.manifest import check_file
from prime_hpc.store.run_paths import RunPaths, list_steps
from prime_hpc.trainer import command_line
from prime_hpc.trainer.checkpointing import resume
from prime_hpc.trainer.checkpointing.resume import checkpoint_to_resume, go_back_by_hand
from tests.support.checkpoints import SHARD, damage, make_checkpoint, make_weights

MEETS = {"--nnodes": "2", "--node-rank": "1", "--rdzv-endpoint": "10.15.42.1:1234"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # nobody loads it
    path = tmp_path / "e.yaml"
    path.write_text(f"name: x\noutput_dir: {tmp_path / 'out'}\nseq_len: 64\nmodel: {{name: {model}, dtype: float32}}\n")
    return path


def test_where_machines_meet_is_read_as_torchrun_reads_it() -> None:
    assert Nodes.of(MEETS, {}) == Nodes(2, 1, "10.15.42.1", 1234)
    environ = {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"}
    assert Nodes.of({"--nnodes": "2", "--node-rank": "0"}, environ) == Nodes(2, 0, "fd00::1", 29500)
    assert Nodes.of(MEETS | {"--rdzv-endpoint": "[fd00::1]:80"}, environ) == Nodes(2, 1, "fd00::1", 80)
    assert Nodes.of({}, environ) is None and Nodes.of({"--nnodes": "1", "--node-rank": "0"}, {}) is None
    assert ranks_of_all({"--nnodes": "2", "--nproc-per-node": "8"}) == 16 and ranks_of_all({}) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"--nnodes": "two"}, "--nnodes two: must be a whole number of at least 1"),
        ({"--nnodes": "2"}, "which of the 2 machines this is: --node-rank 0"),
        ({"--nnodes": "2", "--node-rank": "2"}, "which of the 2 machines"),
        ({"--node-rank": "1"}, "of how many machines"),
        ({"--nnodes": "2", "--node-rank": "0"}, "state where the ranks of all machines meet"),
        (MEETS | {"--rdzv-endpoint": "10.15.42.1"}, "must be HOST:PORT"),
        (MEETS | {"--rdzv-endpoint": "10.15.42.1:70000"}, "must be HOST:PORT"),
    ],
)
def test_machines_that_could_not_meet_are_told_so(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Nodes.of(flags, {})


@pytest.mark.parametrize("program", ["trainer", "sft"])
def test_the_command_becomes_torchrun_with_the_words_of_the_config(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path, program: str
) -> None:
    class Became(BaseException):
        """Torchrun stands in this process's place."""

    def execv(_: str, command: list[str]) -> None:
        raise Became(*command)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith("GLOO")})
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    data = ["--sft.data.path", str(tmp_path / "data.jsonl")] if program == "sft" else []
    words = ["@", str(config), "--output-dir", str(tmp_path / "o"), *data]
    flags = ["--nnodes=2", "--node_rank", "1", "--nproc_per_node", "2", "--rdzv_endpoint=10.15.42.1:1234"]
    monkeypatch.setattr("sys.argv", [program, *flags, *words])
    with pytest.raises(Became) as became:
        getattr(cli, program)()
    python, *command = became.value.args
    assert python == sys.executable and command[:3] == ["-P", "-m", "prime_hpc.trainer.torchrun"]
    meets = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.15.42.1", "--master-port", "1234"]
    assert command[3:11] == meets
    assert command[11:15] == ["--nproc-per-node", "2", "--max-restarts", "0"]
    assert command[15:] == ["-m", "prime_hpc.trainer.main", program, *words, "--trainer.num-ranks", "4"]
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # only one machine's ranks stay on the loopback interface
    assert not (tmp_path / "o" / "x").exists()  # the ranks write it, once they have met


def test_ranks_that_do_not_divide_among_machines_are_refused(
    monkeypatch: pytest.MonkeyPatch, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"{name}={value}" for name, value in MEETS.items()]
    monkeypatch.setattr("sys.argv", ["trainer", *flags, "@", str(config), "--num-ranks", "3"])
    assert cli.trainer() == 2
    assert "trainer.num_ranks: is 3, which does not divide among 2 machines" in capsys.readouterr().err


def test_a_rank_resolves_its_own_command_line(config: Path) -> None:
    assert (
        command_line.is_by_hand([])
        and command_line.is_by_hand(["@", "f"])
        and command_line.is_by_hand(["sft", "--max-steps", "3"])
    )
    assert not command_line.is_by_hand(["outputs/run"]) and not command_line.is_by_hand(["sft"])
    words = ["@", str(config)]
    assert command_line.resolve(words, {"WORLD_SIZE": "16"}).trainer.num_ranks == 16
    assert command_line.resolve(["sft", *words, "--data.type", "fake"], {}).kind == "sft"
    with pytest.raises(ConfigError, match="is 3, but torchrun starts 16 ranks"):
        command_line.resolve([*words, "--num-ranks", "3"], {"WORLD_SIZE": "16"})


def test_what_an_earlier_trainer_left_is_not_gone_over(config: Path, tmp_path: Path) -> None:
    """Its last version would stay in the place of the new one's."""
    words = ["sft", "@", str(config), "--data.type", "fake"]
    paths = RunPaths(tmp_path / "out" / "x")
    make_weights(paths, 3)
    with pytest.raises(ConfigError, match="x holds weight versions up to 3, and no checkpoint: choose another --name"):
        command_line.resolve(words, {})
    make_checkpoint(paths, 3, kind="sft")
    with pytest.raises(ConfigError, match="holds checkpoints up to step 3: go on with --ckpt.resume-step latest"):
        command_line.resolve([*words, "--ckpt"], {})
    assert command_line.resolve([*words, "--ckpt.resume-step", "latest"], {}).ckpt is not None


def test_a_trainer_by_hand_goes_back_behind_what_a_rank_has_found_broken(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its large files are read by the ranks alone, who note it and end; the next command reads it once more."""
    monkeypatch.setattr(newest, "SMALL", 10)
    words = ["sft", "@", str(config), "--data.type", "fake", "--trainer.dist-timeout-s", "2"]
    experiment = command_line.resolve([*words, "--ckpt.resume-step", "latest"], {})
    waits: list[float] = []

    def failed_reads(recheck_s: float) -> FailedReads:
        waits.append(recheck_s)
        return FailedReads(0.2)

    monkeypatch.setattr(resume, "FailedReads", failed_reads)
    paths = RunPaths(tmp_path / "out" / "x")
    with pytest.raises(StoreError, match="no whole checkpoint to resume from .*none is there"):
        checkpoint_to_resume(experiment, paths, None)
    for step in (2, 4, 6):
        make_checkpoint(paths, step, kind="sft")
    damage(paths.checkpoint_step(4), "flip")
    damage(paths.checkpoint_step(6), "truncate")
    found = checkpoint_to_resume(experiment, paths, None)
    assert found is not None and found.step == 4
    with pytest.raises(ArtifactError) as caught:
        check_file(found.path / SHARD, found.manifest.files[SHARD], deep=True)
    record_failed_read(paths, 4, found.manifest, SHARD, caught.value)
    found = checkpoint_to_resume(experiment, paths, None)
    assert found is not None and found.step == 2
    assert set(waits) == {0.2}, "ten such waits fit into the collective in which the other ranks wait"
    go_back_by_hand(paths, 2, 0)
    assert list_steps(paths.checkpoints, digits=0) == [2] and not list_failed_reads(paths)
    assert len(list(paths.checkpoints.glob("set-aside-step_*"))) == 2


def test_an_evaluation_beside_sft_needs_a_supervisor(config: Path) -> None:
    held = ["--data.type", "fake", "--orchestrator.eval.env", "[{'id': 'reverse-text'}]", "--inference"]
    held += ["--orchestrator.eval.sampling.max-tokens", "16", "--orchestrator.sampling.max-tokens", "16"]
    with pytest.raises(ConfigError, match="environments are played beside a supervised run alone"):
        command_line.resolve(["sft", "@", str(config), *held], {})


def test_the_interface_of_the_head_is_used_unless_one_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"MASTER_ADDR": "10.15.42.1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    monkeypatch.setattr(command_line, "route_to", lambda host: command_line.Place("eth7", "10.15.42.2"))
    assert command_line.collectives_interface(several) == {"GLOO_SOCKET_IFNAME": "eth7"}
    assert command_line.collectives_interface(several | {"GLOO_SOCKET_IFNAME": "tailscale0"}) == {}
    assert command_line.collectives_interface(several | {"LOCAL_WORLD_SIZE": "16"}) == {}


def test_a_server_by_hand_takes_the_head_of_its_engines_from_the_environment() -> None:
    environ = {"DATA_PARALLEL_ADDRESS": "10.15.42.1", "DATA_PARALLEL_RPC_PORT": "13345"}
    flags = ["--data-parallel-size", "4", "--data-parallel-size-local", "2"]
    head = load_experiment(flags, "inference", environ).experiment.inference
    assert head is not None
    assert (head.data_parallel_address, head.data_parallel_rpc_port) == ("10.15.42.1", 13345)
    stated = load_experiment([*flags, "--data-parallel-rpc-port", "1"], "inference", environ).experiment.inference
    assert stated is not None and stated.data_parallel_rpc_port == 1
    with pytest.raises(ConfigError, match="DATA_PARALLEL_RPC_PORT"):
        load_experiment(flags, "inference", environ | {"DATA_PARALLEL_RPC_PORT": "ten"})


ENV = ["--orchestrator.env", "[{'id': 'reverse-text'}]"]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (
            ["--monitor.wandb.id", "a", "--orchestrator.monitor.wandb.id", "b"],
            {"trainer_id": "a", "orchestrator_id": "b"},
        ),
        (["--monitor.wandb.project", "p"], {"project": "p"}),
        (
            ["--no-trainer.wandb.log-extras.distributions", "--orchestrator.wandb.log-extras.interval", "50"],
            {"samples_interval": 50, "samples": None, "distributions": None},
        ),
        (
            ["--orchestrator.wandb.log-extras.interval=5", "--no-orchestrator.wandb.log-extras.samples"],
            {"samples_interval": 5, "samples": False, "distributions": None},
        ),
        (
            ["--orchestrator.wandb.log-extras.interval=5", "--orchestrator.wandb.log-extras.distributions", "false"],
            {"samples": None, "distributions": False},
        ),
    ],
)
def test_other_names_of_the_monitors_keys(flags: list[str], found: dict[str, Any]) -> None:
    for entrypoint in ("rl", "trainer"):
        wandb = load_experiment([*ENV, *flags], entrypoint, {}).experiment.wandb
        assert wandb is not None and {name: getattr(wandb, name) for name in found} == found


@pytest.mark.parametrize(
    ("entrypoint", "flags", "found"),
    [
        ("orchestrator", ["--monitor.wandb.id", "b"], {"trainer_id": None, "orchestrator_id": "b"}),
        ("orchestrator", ["--wandb.log-extras.interval=5", "--no-wandb.log-extras.samples"], {"samples": False}),
        ("trainer", ["--monitor.wandb.id", "a"], {"trainer_id": "a", "orchestrator_id": None}),
        ("sft", ["--data.type", "fake", "--monitor.wandb.id", "a"], {"trainer_id": "a", "orchestrator_id": None}),
    ],
)
def test_a_component_alone_means_its_own_run(entrypoint: str, flags: list[str], found: dict[str, Any]) -> None:
    of_rl = ENV if entrypoint == "orchestrator" else []
    wandb = load_experiment([*of_rl, *flags], entrypoint, {}).experiment.wandb
    assert wandb is not None and {name: getattr(wandb, name) for name in found} == found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trainer.wandb.log-extras.distributions"], "the orchestrator's: --wandb.distributions"),
        (["--trainer.wandb.log-extras.interval", "5"], "--wandb.samples-interval"),
        (["--train.micro_bs", "4"], "--trainer.micro-batch-tokens"),
        (["--data.num_workers", "2"], "--sft.data.num-workers"),
        (["--data.micro-batch-size", "4"], "--trainer.micro-batch-tokens; of SFT it is --sft.data.micro-batch-size"),
        (["--batch-size", "64"], "--orchestrator.batch-size"),
        (["--micro-batch-size", "4"], "--trainer.micro-batch-tokens"),
        (["--trainer.data.seq-len", "512"], "in tokens, is --seq-len"),
        (["--orchestrator.eval.environment-ids", "math500"], "--orchestrator.eval.env"),
    ],
)
def test_keys_that_have_no_counterpart_name_what_to_state(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no such key: .*{words}"):
        load_experiment([*ENV, *flags], "rl", {})
