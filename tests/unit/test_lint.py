"""Lint: every code has a config that provokes it and one that does not."""

import json
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.estimate.step_time import pace
from prime_hpc.launch.lint.lint import CODES, lint, lint_errors
from tests.support.lint import LLAMA_8B, SITE, findings, good, merged

OPD = {"advantage": {"type": "opd"}, "teacher": {"model": "owner/teacher"}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def test_nothing_to_say_about_a_good_one(model: Path) -> None:
    assert findings(model, {}) == []
    few = {"orchestrator": {"batch_size": 16, "max_concurrent": 256}}  # episodes in flight by default
    assert not [finding for finding in findings(model, few) if "more than the" in finding.message]


def test_a_mixture_of_experts_is_told_to_follow_the_engines_choice(model: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    (model / "config.json").write_text(json.dumps(LLAMA_8B | experts))

    def found(changes: dict[str, Any]) -> list[tuple[str, str | None]]:
        return [(f.severity, f.key) for f in findings(model, changes) if f.code == "PH127"]

    assert found({}) == [("info", "trainer.router_replay")]
    assert found({"trainer": FOLLOWS, "model": {"router_dtype": "float32"}}) == []
    assert found({"trainer": FOLLOWS, "model": {"lora": {}}}) == [("error", "trainer.router_replay")]
    assert found({"trainer": FOLLOWS, "kind": "sft"}) == [("error", "trainer.router_replay")]
    (model / "config.json").write_text(json.dumps(LLAMA_8B | experts | {"model_type": "phimoe"}))
    assert found({}) == [] and found({"trainer": FOLLOWS}) == [("error", "trainer.router_replay")]


SLURM = "slurm"
MANY: dict[str, Any] = {
    "model": {"lora": {}},
    "trainer": {"max_concurrent_runs": 4},
    "orchestrator": {"env": [], "eval": {}},
    "max_steps": 5,
}
"""A trainer of many runs; environments and steps are its runs' own."""
ON_ONE_GPU: dict[str, Any] = {
    "trainer": {"num_ranks": 1},
    "inference": {"num_replicas": 1, "data_parallel_size": 1},
    "inference_gpu_ids": [0],
    "trainer_gpu_ids": [0],
    "slurm": {"gpus_per_node": 1},
}
SLEEPING = {
    **ON_ONE_GPU,
    "model": {"lora": {}},
    "async_level": 0,
    "inference": {"num_replicas": 1, "sleep": True},
}
ONE = {"backend": "transformers", "data_parallel_size": 1}
FOLLOWS = {"router_replay": True}
OPD_ON_ONE_GPU: dict[str, Any] = {
    **ON_ONE_GPU,
    "trainer_gpu_ids": [1],
    "teacher_gpu_ids": [0],
    "slurm": {"gpus_per_node": 2},
    "orchestrator": {"env": [{"id": "reverse-text"}], **OPD},
}
PROVOKED: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("PH101", "error", {"inference": {"tensor_parallel_size": 3, "data_parallel_size": 2}}, {}, "32 attention heads"),
    ("PH102", "error", {"inference": {"tensor_parallel_size": 3, "data_parallel_size": 2}}, {}, "8 key-value heads"),
    ("PH103", "error", {"inference": {"tensor_parallel_size": 7, "data_parallel_size": 1}}, {}, "128256"),
    ("PH104", "error", {"seq_len": 16384}, {}, "max_position_embeddings = 8192"),
    ("PH104", "error", {"inference": {"max_model_len": 9000}}, {}, "9000 tokens"),
    ("PH105", "error", {"trainer": {"num_ranks": 1}}, {}, "state 119"),
    ("PH105", "error", {"trainer": {"micro_batch_tokens": 65536}, "model": {"ac": None}}, {}, "activations"),
    ("PH105", "warning", {"trainer": {"micro_batch_tokens": 16384}, "model": {"ac": None}}, {}, "activations"),
    ("PH106", "error", {}, {"partitions": {"h100": {"gpus_per_node": 8, "gpu_memory_gib": 16}}}, "15.0 GiB of weights"),
    (
        "PH106",
        "warning",
        {"inference": {"vllm": {"quantization": "fp8"}}},
        {"partitions": {"h100": {"gpus_per_node": 8, "gpu_memory_gib": 16}}},
        "15.0 GiB of weights",
    ),
    (
        "PH124",
        "error",
        {"inference": {"backend": "transformers", "data_parallel_size": 8}},
        {},
        "one server is one engine",
    ),
    ("PH124", "error", {"inference": {**ONE, "tensor_parallel_size": 2}}, {}, "an engine computes on one device"),
    ("PH124", "error", {"inference": {**ONE, "vllm": {"quantization": "fp8"}}}, {}, "vLLM's own arguments"),
    ("PH124", "error", {"inference": ONE, "model": {"lora": {}}}, {}, "serves no adapters"),
    ("PH124", "error", {"inference": ONE, "model": {"vision": "frozen"}}, {}, "takes text alone, no images"),
    (
        "PH124",
        "error",
        {"inference": ONE, "orchestrator": {"sampling": {"extra": {"repetition_detection": {"max_pattern_size": 3}}}}},
        {},
        "repetition_detection",
    ),
    ("PH124", "error", {"inference": {"vllm": {"api-server-count": 4}}}, {}, "one process holds the policy version"),
    ("PH124", "error", {"inference": {"vllm": {"max_num_seqs": 8}}}, {}, "states this as inference.max_num_seqs"),
    ("PH124", "error", {"inference": {"vllm": {"max_num_seq": 8}}}, {}, "no such argument"),
    ("PH125", "error", {"inference": {"backend": "nowhere.at.all:X"}}, {}, "cannot import"),
    ("PH125", "error", {"inference": {"backend": "json:dumps"}}, {}, "no inference backend"),
    ("PH106", "error", {"inference": {"kv_offload_gib": 700}}, {}, "of its 1000 GiB of host memory"),
    ("PH124", "error", {"inference": {"kv_offload_gib": 8}, "device": "cpu"}, {}, "in host memory already"),
    ("PH124", "error", {"inference": {**ONE, "kv_offload_gib": 8}}, {}, "stays where it is"),
    ("PH126", "error", {"weights": {"transport": "gloo"}, "model": {"lora": {}}}, {}, "always go as files"),
    ("PH126", "error", {"weights": {"transport": "gloo"}, "inference": ONE}, {}, "transformers backend does not"),
    ("PH126", "error", {"weights": {"transport": "nccl"}, "trainer": {"backend": "gloo"}}, {}, "are on CPUs"),
    ("PH126", "error", ON_ONE_GPU | {"weights": {"transport": "nccl"}}, {}, "no two processes on one GPU"),
    ("PH124", "error", {"trainer": FOLLOWS, "inference": {"pipeline_parallel_size": 2}}, {}, "without pipeline stages"),
    (
        "PH124",
        "error",
        {"trainer": FOLLOWS, "inference": {"vllm": {"enable_prefix_caching": False}}},
        {},
        "beside its prefix cache",
    ),
    ("PH127", "error", {"trainer": FOLLOWS}, {}, "has no experts, so nothing to follow"),
    ("PH127", "error", {"model": {"router_dtype": "float32"}}, {}, "has no experts, so no routers"),
    ("PH107", "warning", {"model": {"name": "/nowhere/at/all"}}, {}, "is not there"),
    ("PH107", "info", {"model": {"name": "someone/unheard-of"}}, {}, "hub's cache"),
    ("PH108", "error", {"model": {"dtype": "float16"}}, {}, "loss scaling"),
    ("PH109", "error", {"trainer": {"parallel": {"tp": 16}}}, {}, "16 does not divide the model's 8 key-value heads"),
    ("PH110", "error", {"trainer": {"num_ranks": 96, "parallel": {"cp": 3}}}, {}, "3 does not divide the 32 attention"),
    ("PH110", "error", {"trainer": {"num_ranks": 96, "parallel": {"tp": 2, "cp": 3}}}, {}, "16 attention heads of a"),
    ("PH111", "error", {"trainer": {"parallel": {"ep": 4}}}, {}, "experts of a dense model"),
    (
        "PH112",
        "warning",
        {"trainer": {"num_ranks": 12, "parallel": {"tp": 4}}, "slurm": {"trainer": {"nodes": 2}}},
        {},
        "groups of 4 ranks do not fit into nodes of 6",
    ),
    ("PH120", "error", ON_ONE_GPU, {}, "90% of GPU 0 are the engines', 8 GiB are left"),
    (
        "PH120",
        "warning",
        {**ON_ONE_GPU, "model": {"name": "owner/unheard-of"}},
        {},
        "90% of GPU 0, on which the trainer",
    ),
    (
        "PH120",
        "error",
        {**OPD_ON_ONE_GPU, "teacher_inference": {"gpu_memory_utilization": 0.2}},
        {},
        "engines on GPU 0 take 110% of its memory together",
    ),
    ("PH120", "error", SLEEPING, {}, "while engines sample they take 90% of GPU 0, and the trainer keeps"),
    (
        "PH120",
        "warning",
        merged(SLEEPING, {"trainer_gpu_ids": [1], "slurm": {"gpus_per_node": 2}}),
        {},
        "no GPU in common",
    ),
    ("PH120", "warning", merged(SLEEPING, {"device": "cpu"}), {}, "on a CPU engines only pause"),
    (
        "PH122",
        "info",
        {"inference": {"data_parallel_size": 4, "num_replicas": 2}},
        {},
        "one HTTP process serves 4 engines of a dense model",
    ),
    (
        "PH123",
        "error",
        {"inference": {"pipeline_parallel_size": 64, "data_parallel_size": 1}},
        {},
        "the model's 32 layers",
    ),
    ("PH202", "warning", {"orchestrator": {"batch_size": 8}}, {}, "leaves 8 of 16"),
    ("PH202", "warning", {"orchestrator": {"batch_size": 24}}, {}, "do not divide"),
    ("PH203", "warning", {"orchestrator": {"max_concurrent": 4}}, {}, "fewer than the 8 of one prompt"),
    ("PH203", "warning", {"orchestrator": {"max_concurrent": 4}}, {}, "without a request"),
    ("PH203", "warning", {"orchestrator": {"max_concurrent": 1000}}, {}, "more than the 384"),
    ("PH203", "warning", {"orchestrator": {"adaptive_concurrency": {"most": 4}}}, {}, "fewer than the 8 of one prompt"),
    ("PH204", "error", {"orchestrator": {"env": [], "eval": {}}}, {}, "neither it nor the training"),
    ("PH205", "warning", {"ckpt": None}, {}, "begins again at step 1"),
    ("PH206", "warning", {"ckpt": {"interval": 100}}, {}, "only the last step"),
    ("PH207", "warning", {"kind": "sft", "sft": {"data": {"path": "/nowhere/x.jsonl"}}}, {}, "does not exist"),
    (
        "PH207",
        "warning",
        {"kind": "sft", "sft": {"data": {"type": "fake", "chat_template": "/nowhere/x"}}},
        {},
        "x does",
    ),
    (
        "PH209",
        "warning",
        {"orchestrator": {"advantage": {"echo": {}}, "env": [{"id": "reverse-text", "max_turns": 1}]}},
        {},
        "max_turns = 1",
    ),
    (
        "PH208",
        "warning",
        {"orchestrator": {"curriculum": {"sampler": {"type": "difficulty_pool", "hard_probability": 0}}}},
        {},
        "hard once is never drawn again",
    ),
    (
        "PH208",
        "warning",
        {
            "orchestrator": {
                "curriculum": {"sampler": {"type": "difficulty_pool", "easy_probability": 1.0, "hard_probability": 1.0}}
            }
        },
        {},
        "that is the standard order",
    ),
    ("PH205", "warning", {**MANY, "ckpt": None}, {}, "a run that does not state its own begins again"),
    ("PH210", "warning", MANY, {}, "no run is below /shared/runs/x yet"),
    ("PH211", "error", {"orchestrator": {"sampling": {"temperature": 0}}}, {}, "every rollout of a prompt is the same"),
    ("PH213", "warning", {"orchestrator": {"stale": "mask"}, "async_level": 0}, {}, "no token is older than the batch"),
    (
        "PH213",
        "warning",
        {"orchestrator": {"stale": "mask"}, "model": {"lora": {}}},
        {},
        "keeps the adapter that it began with",
    ),
    ("PH301", "error", {SLURM: {"partition": "h10"}}, {}, "no partition 'h10'"),
    ("PH302", "error", {SLURM: {"gpus_per_node": 16}}, {}, "16 GPUs a node are asked of h100"),
    ("PH303", "error", {"trainer": {"num_ranks": 256}}, {}, "needs 33 nodes of h100, which has 16"),
    ("PH304", "error", {SLURM: {"time": "12h"}}, {}, "'12h' is no time"),
    ("PH304", "error", {SLURM: {"time_min": "13:00:00"}}, {}, "above time"),
    ("PH305", "error", {SLURM: {"time": "0"}}, {}, "time of zero"),
    ("PH306", "error", {SLURM: {"time": "3-00:00:00"}}, {}, "longest time of h100, 2-00:00:00"),
    ("PH306", "error", {SLURM: {"time": "UNLIMITED"}}, {}, "no limit is above"),
    ("PH307", "warning", {SLURM: {"time": None}}, {}, "no time limit"),
    ("PH308", "error", {SLURM: {"layout": "het"}}, {"het_jobs": False}, "accepts no het jobs"),
    ("PH308", "error", {SLURM: {"layout": "het", "spare_nodes": 1}}, {}, "homogeneous jobs alone"),
    ("PH308", "error", {"trainer": {"num_ranks": 9}}, {}, "evenly over 2 nodes"),
    ("PH309", "error", {SLURM: {"restart": {"how": "requeue"}}}, {"requeue": False}, "does not allow"),
    ("PH328", "warning", {SLURM: {"partition": "spot", "restart": {"how": "off"}}}, {}, "in spot, where jobs are"),
    ("PH328", "info", {SLURM: {"partition": "another", "restart": {"how": "off"}}}, {}, "would not come back"),
    ("PH329", "warning", {"model": {"name": "someone/unheard-of"}}, {"internet": False}, "reach no internet"),
    ("PH329", "info", {"model": {"name": "someone/unheard-of"}}, {"env": {"HF_HUB_OFFLINE": "1"}}, "HF_HUB_OFFLINE"),
    ("PH309", "warning", {SLURM: {"partition": "spot", "restart": {"how": "requeue"}}}, {}, "cancelled, not requeued"),
    ("PH310", "error", {SLURM: {"time": "20", "restart": {"signal_lead_s": 1200}}}, {}, "before it begins"),
    ("PH310", "warning", {SLURM: {"restart": {"signal_lead_s": 60}}}, {}, "may take longer"),
    ("PH311", "error", {SLURM: {"time": "4", "restart": {"signal_lead_s": 60}}}, {}, "shorter than start-up"),
    ("PH311", "warning", {SLURM: {"time": "6", "restart": {"signal_lead_s": 60}}}, {}, "shorter than start-up"),
    ("PH312", "info", {"inference": {"server": {"host": "127.0.0.1"}}}, {}, "listen on all addresses"),
    ("PH312", "warning", {"inference": None}, {}, "starts no server"),
    ("PH313", "error", {"output_dir": "/tmp/runs"}, {}, "below /tmp"),
    ("PH313", "error", {"output_dir": "/nvme/me/runs"}, {"node_local": "/nvme/$USER"}, "below /nvme"),
    ("PH313", "warning", {"output_dir": "/tmp/runs", "trainer": {"num_ranks": 2}, "inference": None}, {}, "below /tmp"),
    (
        "PH327",
        "error",
        {"inference": {"num_replicas": 1, "data_parallel_size": 8}, "network": {"port_range": "20000-20008"}},
        {},
        "has 9 ports, but up to 10 are needed",
    ),
    ("PH327", "info", {}, {"network": {"port_range": "1024-65535"}}, "overlaps the ports"),
    (
        "PH327",
        "warning",
        {"inference": {"data_parallel_size": 8, "server": {"port": 9000}}, "network": {"port_range": "20000-20100"}},
        {},
        "9000 lies outside network.port_range",
    ),
    ("PH314", "error", {SLURM: {"dependency": "after-ok:1"}}, {}, "no dependency"),
    ("PH315", "warning", {SLURM: {"cpus_per_task": None}}, {}, "often one CPU"),
    ("PH315", "error", {SLURM: {"cpus_per_task": 200}}, {}, "whose nodes have 96"),
    ("PH316", "info", {SLURM: {"mem": None}}, {}, "default may be small"),
    ("PH316", "error", {SLURM: {"mem": "2T"}}, {}, "whose nodes have 1000 GiB"),
    ("PH316", "error", {SLURM: {"extra": {"mem-per-cpu": "1G"}}}, {}, "only one of mem"),
    ("PH317", "warning", {"trainer": {"num_ranks": 2}, "inference": None}, {}, "8 GPUs a node are asked for and 2"),
    (
        "PH317",
        "warning",
        {"trainer": {"num_ranks": 2}, "inference": None, "device": "cpu", SLURM: {"gpus_per_node": 8}},
        {},
        "none is used",
    ),
    ("PH318", "error", {SLURM: {"partition": None}}, {}, "no GPUs are asked for"),
    ("PH114", "error", {"model": {"attn": "flash"}}, {}, "flash-attn is not installed"),
    ("PH115", "info", {"model": {"dtype": "float32"}}, {}, "no flash attention"),
    (
        "PH319",
        "warning",
        {SLURM: {"time": None, "trainer": {"time": "1:00:00"}, "layout": "het"}},
        {},
        "hands on trainer's, 1:00:00",
    ),
    ("PH212", "error", {"orchestrator": {"env": [{"id": "humaneval"}]}}, {}, "Python that the model writes"),
    (
        "PH220",
        "warning",
        {"trainer": {"scheduler": {"type": "linear", "decay_steps": 10}}, "max_steps": 40},
        {},
        "the last 30 steps have learning rate 0",
    ),
    ("PH220", "warning", {"trainer": {"scheduler": {"warmup_steps": 80}}, "max_steps": 40}, {}, "has 0.5 of the peak"),
    (
        "PH220",
        "error",
        {"trainer": {"scheduler": {"type": "wsd", "warmup_steps": 40, "decay_steps": 10}}, "max_steps": 40},
        {},
        "together exceed",
    ),
    ("PH221", "warning", {"trainer": {"loss": {"type": "gspo"}}}, {}, "at 0.0003, and in bfloat16"),
    (
        "PH222",
        "warning",
        {"orchestrator": {"advantage": {"zero": "drop"}}, "trainer": {"loss": {"kl": {}}}},
        {},
        "not applied to groups without signal",
    ),
    ("PH223", "warning", {"orchestrator": {"advantage": {"type": "opsd"}}}, {}, "fills its context cannot be scored"),
    (
        "PH230",
        "warning",
        {"orchestrator": {"env_servers": {"workers": 16}}, "slurm": {"cpus_per_task": 16}},
        {},
        "16 workers, and the orchestrator beside them, on a node with 16 CPUs",
    ),
    ("PH231", "error", {"orchestrator": {"env_servers": {"addresses": ["n1:7000"]}}}, {}, "no environment has workers"),
    ("PH232", "error", {"orchestrator": {"env": [{"id": "Reverse_txt"}]}}, {}, "did you mean reverse-text?"),
    (
        "PH232",
        "warning",
        {"orchestrator": {"env": [{"id": "no-such", "workers": 1}], "env_servers": {"addresses": ["n1:7000"]}}},
        {},
        "found as the module 'no_such'",
    ),
    ("PH236", "error", {"orchestrator": {"env": [{"id": "rows"}]}}, {}, "name JSONL or Parquet files, or a data set"),
    (
        "PH236",
        "error",
        {"orchestrator": {"env": [{"id": "rows", "args": {"dataset": "a/b", "reward": "f1"}}]}},
        {},
        "'f1' is none of math, exact, contains; your own is",
    ),
    ("PH236", "error", {"orchestrator": {"env": [{"id": "wordle", "args": {"guesses": 3}}]}}, {}, "max_guesses?"),
    ("PH232", "warning", {"orchestrator": {"env": [{"id": "x"}]}}, {"container": {"image": "/x.sif"}}, "'x'"),
    ("PH232", "warning", {"orchestrator": {"env": [{"id": "x"}]}, SLURM: {"env_pack": "/x.sqsh"}}, {}, "'x'"),
    (
        "PH233",
        "warning",
        {"orchestrator": {"advantage": {"type": "no_such_module:f"}}},
        {},
        "no module 'no_such_module'",
    ),
    ("PH233", "warning", {"trainer": {"loss": {"type": "prime_hpc.trainer:f"}}}, {}, "defines no 'f'"),
    ("PH233", "warning", {"trainer": {"loss": {"type": "nowhere:f"}}}, {"container": {"image": "/x.sif"}}, "nowhere"),
    (
        "PH235",
        "warning",
        {"inference": None, "orchestrator": {"client": {"base_url": "http://a/v1", "api_key_var": "NO_SUCH_KEY"}}},
        {},
        "NO_SUCH_KEY is not set",
    ),
    ("PH234", "error", {"output_dir": f"{__file__}/below"}, {}, "is a file"),
    (
        "PH240",
        "warning",
        {"alarms": {"rules": [{"metric": "trainer.entrpy", "below": 1}]}},
        {},
        "no metric of this name",
    ),
    ("PH241", "warning", {"trainer": {"loss": {"clip_low": 0.1}}}, {}, "it is for an objective with a trust region"),
    ("PH241", "warning", {"trainer": {"loss": {"type": "grpo", "delta": 2}}}, {}, "trainer.loss.type = aipo"),
    ("PH241", "warning", {"trainer": {"optim": {"momentum": 0.5}}}, {}, "muon or signsgd"),
    ("PH241", "warning", {"orchestrator": {"advantage": {"timeout_reward": -1}}}, {}, "timeout = penalize"),
    ("PH241", "warning", {"kind": "sft", "trainer": {"data": {"fake": {}}}}, {}, "kind = rl"),
    ("PH241", "warning", {"trainer": {"profile": {"ranks": [16]}}}, {}, "trainer.num_ranks = 16"),
    ("PH241", "warning", {"inference": None, "inference_gpu_ids": [0]}, {}, "servers that the run starts"),
    ("PH242", "error", {"ckpt": {"resume_step": f"{Path(__file__).parent}/lastest"}}, {}, "is not there"),
    ("PH319", "warning", {SLURM: {"layout": "het", "inference": {"licenses": "x:1"}}}, {}, "whole job's"),
    ("PH320", "warning", {"inference": {"data_parallel_size_local": 4}}, {}, "the placement decides"),
    ("PH321", "error", {SLURM: {"switches": "one"}}, {}, "no count of switches"),
    ("PH321", "error", {SLURM: {"mail_type": "END,SOMETIMES"}}, {}, "'SOMETIMES' is no mail type"),
    ("PH321", "error", {SLURM: {"mem": "lots"}}, {}, "no memory size"),
    ("PH322", "info", {SLURM: {"time": "14", "restart": {"signal_lead_s": 700}}}, {}, "may take 900 s"),
    ("PH323", "error", {SLURM: {"job_name": "a\nb"}}, {}, "line break"),
    ("PH324", "error", {}, {"container": {"image": "./x.sif"}}, "relative path"),
    ("PH325", "error", {}, {"container": {"image": "x", "mounts": ["/a:/shared"]}}, "/shared is the host's /a"),
    ("PH326", "warning", {SLURM: {"exclusive": None}}, {"gpu_option": "none"}, "does not give GPUs out"),
    (
        "PH312",
        "warning",
        {"orchestrator": {**OPD, "teacher": {"base_url": "http://localhost:8000/v1"}}},
        {},
        "starts no server",
    ),
]


@pytest.mark.parametrize(
    ("code", "severity", "change", "site", "words"), PROVOKED, ids=[f"{p[0]}-{p[4]}" for p in PROVOKED]
)
def test_what_lint_says(
    model: Path, code: str, severity: str, change: dict[str, Any], site: dict[str, Any], words: str
) -> None:
    found = [f for f in findings(model, change, **site) if f.code == code and words in f.message]
    assert [f.severity for f in found[:1]] == [severity], findings(model, change, **site)
    assert all(f.remedy for f in found)


def test_roles_that_share_nodes_are_named_together_for_gpus_that_nobody_uses(model: Path) -> None:
    few = {
        "trainer": {"num_ranks": 2},
        "inference": {"num_replicas": 1, "data_parallel_size": 2, "tensor_parallel_size": 1},
    }
    found = [f for f in findings(model, few) if f.code == "PH317"]
    assert [f.message.partition(" GPUs")[0] for f in found] == ["trainer and inference: 8"]


def test_a_started_teacher_is_held_to_what_the_policys_engines_are(model: Path) -> None:
    """Every finding names the teacher's own key."""
    known = {"orchestrator": {**OPD, "teacher": {"model": str(model)}}}

    def said(servers: dict[str, Any], **change: Any) -> set[tuple[str, str, str | None]]:
        found = findings(model, known | {"teacher_inference": servers} | change)
        return {(f.code, f.severity, f.key) for f in found}

    assert said({"num_replicas": 8}) == set()
    assert said({}, slurm={"layout": "het"}) == {("PH317", "warning", "slurm.gpus_per_node")}  # one engine, 8 GPUs
    assert ("PH101", "error", "teacher_inference.tensor_parallel_size") in said({"tensor_parallel_size": 3})
    assert ("PH104", "error", "seq_len") in said({}, seq_len=8192)
    assert ("PH104", "error", "teacher_inference.max_model_len") in said({"max_model_len": 9000})
    assert ("PH106", "error", "teacher_inference.tensor_parallel_size") in said({"gpu_memory_utilization": 0.1})
    assert ("PH320", "warning", "teacher_inference.data_parallel_size_local") in said({"data_parallel_size_local": 1})
    assert ("PH308", "error", "slurm.teacher.nodes") in said({"data_parallel_size": 9}, slurm={"teacher": {"nodes": 1}})
    unknown = findings(model, {"orchestrator": OPD, "teacher_inference": {"data_parallel_size": 8}})
    assert [(f.code, f.severity, f.key) for f in unknown] == [("PH107", "info", "orchestrator.teacher.model")]


def test_gpus_of_other_nodes_are_others(model: Path) -> None:
    """Keys name positions: those of a node that both roles use are shared, the same ones of two nodes are not."""
    apart = merged(ON_ONE_GPU, {"slurm": {"trainer": {"nodes": 1}}, "weights": {"transport": "nccl"}})

    def said(change: dict[str, Any]) -> set[str]:
        return {f.code for f in findings(model, change)} & {"PH120", "PH126"}

    assert said(ON_ONE_GPU | {"weights": {"transport": "nccl"}}) == {"PH120", "PH126"}
    assert said(apart) == set()
    sleeps = merged(SLEEPING, {"slurm": {"trainer": {"nodes": 1}}})
    assert [f.message for f in findings(model, sleeps) if f.code == "PH120"] == [
        "engines and trainer have no GPU in common, so that they would sleep for nothing"
    ]


def test_a_sandbox_wants_bubblewrap(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    env: dict[str, Any] = {"id": "humaneval", "sandbox": {}}
    (found,) = findings(model, {"orchestrator": {"env": [env]}})
    assert (found.code, found.severity, found.key) == ("PH212", "warning", "orchestrator.env[0].sandbox")
    assert "apt-get install bubblewrap" in found.message
    allowed = {"id": "humaneval", "args": {"allow_code_execution": True}}
    assert findings(model, {"orchestrator": {"env": [allowed]}}) == []


def test_servers_by_hand_and_a_misspelt_word_are_told_on_one_machine_too(model: Path) -> None:
    change = {"launch": "local", SLURM: None, "inference": {"data_parallel_size_local": 4}}
    step = {"ckpt": {"resume_step": f"{model}/lastest"}}
    found = {f.code: f for f in findings(model, merged(change, step), partitions={})}
    assert "on one machine the run starts all engines there" in found["PH320"].message
    assert found["PH242"].remedy == "did you mean latest?"


def test_every_code_is_provoked() -> None:
    in_tests_of_their_own = {"PH000", "PH113", "PH118", "PH119", "PH121", "PH128", "PH129", "PH201", "PH214", "PH224"}
    in_tests_of_their_own |= {"PH332", "PH333"}
    assert {p[0] for p in PROVOKED} | in_tests_of_their_own == set(CODES)


def test_a_trainer_of_many_runs_is_not_held_to_what_they_state(model: Path, tmp_path: Path) -> None:
    assert {f.code for f in findings(model, MANY)} == {"PH210"}
    (tmp_path / "x" / "run_a").mkdir(parents=True)
    assert not {f.code for f in findings(model, {**MANY, "output_dir": str(tmp_path)})} & {"PH204", "PH206", "PH210"}


def test_a_group_of_one(model: Path) -> None:
    one = Experiment.model_validate(good(model))
    # the config refuses it for the objectives that it knows; lint for any to come
    single = one.orchestrator.model_copy(update={"rollouts_per_example": 1})
    found = lint(one.model_copy(update={"orchestrator": single}), SiteConfig.model_validate(SITE))
    assert [f.code for f in found] == ["PH201"]


def test_a_job_that_nobody_preempts_need_not_come_back(model: Path) -> None:
    assert findings(model, {"slurm": {"restart": {"how": "off", "signal_lead_s": 1200}}}) == []


def test_near_partition_is_named(model: Path) -> None:
    found = findings(model, {"slurm": {"partition": "h10"}})
    assert next(f for f in found if f.code == "PH301").remedy == "did you mean h100?"


def test_errors_come_first_and_are_what_submit_refuses(model: Path) -> None:
    change = {"slurm": {"time": "0", "cpus_per_task": None, "mem": None}}
    severities = [f.severity for f in findings(model, change)]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    one = Experiment.model_validate(merged(good(model), change))
    assert [f.code for f in lint_errors(one, SiteConfig.model_validate(SITE))] == ["PH305"]


@pytest.mark.parametrize(
    "text",
    ["afterok:1", "afterok:1:2,afternotok:3", "afterany:1?afterany:2", "singleton", "after:1+5", "aftercorr:7_*"],
)
def test_dependencies_that_slurm_reads(model: Path, text: str) -> None:
    assert findings(model, {"slurm": {"dependency": text}}) == []


def test_tensor_parallel_sizes_that_vllm_takes(model: Path) -> None:
    for size in (1, 2, 4, 8):
        assert findings(model, {"inference": {"tensor_parallel_size": size, "data_parallel_size": 1}}) == [], size


def test_the_pace_of_an_earlier_life_counts(model: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "runs" / "x" / "metrics"
    metrics.mkdir(parents=True)
    rows = [{"step": n, "time/step": 900.0 + n, "time/checkpoint": 100.0 * (n == 2)} for n in range(1, 4)]
    (metrics / "trainer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    change = {"output_dir": str(tmp_path / "runs"), "slurm": {"time": "30", "restart": {"signal_lead_s": 700}}}
    one = Experiment.model_validate(merged(good(model), change))
    speed = pace(one, None)
    assert (speed.step_s, speed.save_s) == (902.0, 100.0)
    (found,) = [f for f in lint(one, SiteConfig.model_validate({**SITE, "scratch": "/"})) if f.code == "PH311"]
    assert found.severity == "error" and "median of the last 3 steps" in found.message
