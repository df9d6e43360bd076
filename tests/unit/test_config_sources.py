"""The four sources, their precedence, scopes and lifting, through the one public function that entrypoints call."""

from pathlib import Path

import pytest

from prime_hpc.config import ConfigError, Experiment, load_experiment
from prime_hpc.config.errors import Origin
from prime_hpc.config.experiment import COMPONENTS
from prime_hpc.config.schema import all_paths

FAKE = ["--data.type", "fake"]
ENV = ["--orchestrator.env", '[{"id": "reverse-text"}]']


def load(argv: list[str], entrypoint: str = "trainer", environ: dict[str, str] | None = None) -> Experiment:
    return load_experiment(argv, entrypoint, environ or {}).experiment


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def problems(argv: list[str], entrypoint: str = "trainer", environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_experiment(argv, entrypoint, environ or {})
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def worked_example(tmp_path: Path) -> tuple[dict[str, str], list[str], list[str]]:
    """The precedence example of the reference pages: environment, two files in order, a flag."""
    first = write(tmp_path / "qwen8b.toml", '[model]\nname = "Qwen/Qwen3-8B"\n')
    second = write(tmp_path / "qwen14b.toml", '[model]\nname = "Qwen/Qwen-14B"\n')
    return {"PRIME_MODEL__NAME": "Qwen/Qwen3-4B"}, [first, second], ["--model.name", "Qwen/Qwen3-32B"]


def test_precedence_worked_example(worked_example: tuple[dict[str, str], list[str], list[str]]) -> None:
    environ, (first, second), flag = worked_example
    files = ["@", first, "@", second]
    assert load([*files, *flag], "inference", environ).model.name == "Qwen/Qwen3-32B"
    assert load(files, "inference", environ).model.name == "Qwen/Qwen-14B"
    assert load(["@", first], "inference", environ).model.name == "Qwen/Qwen3-8B"
    assert load([], "inference", environ).model.name == "Qwen/Qwen3-4B"
    assert load([], "inference", {}).model.name == "Qwen/Qwen3-0.6B"


def test_a_flag_before_the_files_still_wins(worked_example: tuple[dict[str, str], list[str], list[str]]) -> None:
    environ, (first, second), flag = worked_example
    argv = [*flag, f"@{first}", f"@{second}"]
    assert load(argv, "inference", environ).model.name == "Qwen/Qwen3-32B"
    assert load(argv[2:], "inference", environ).model.name == "Qwen/Qwen-14B"


def test_provenance_names_the_winner(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "seed: 1\nmodel:\n  name: a\ntrainer:\n  optim:\n    lr: 1e-5\n")
    argv = ["@", path, "--seed", "2"]
    provenance = load_experiment(argv, "trainer", {"PRIME_MAX_STEPS": "7"}).provenance
    assert provenance["seed"] == Origin("command line", "--seed")
    assert provenance["trainer.optim.lr"] == Origin("file", path, 6)
    assert provenance["max_steps"] == Origin("environment", "PRIME_MAX_STEPS")
    assert "async_level" not in provenance


def test_a_section_that_was_off_is_of_whoever_switched_it_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "ckpt: {interval: 5}\nmodel:\n  lora: null\n")
    provenance = load_experiment(
        ["@", path, "--model.lora.rank", "4", "--ckpt.interval", "6", *ENV], "rl", {}
    ).provenance
    assert provenance["model.lora"] == Origin("command line", "--model.lora.rank")
    assert provenance["ckpt"] == Origin("file", path, 1)


def test_yaml_and_toml_mean_the_same(tmp_path: Path) -> None:
    yaml = write(
        tmp_path / "a.yaml",
        "max_steps: 3\ntrainer: {optim: {lr: 3e-4, betas: [0.8, 0.9]}}\n"
        "orchestrator:\n  env:\n    - id: a\n      args: {n: 1}\n    - {id: b, ratio: 2}\n",
    )
    toml = write(
        tmp_path / "a.toml",
        "max_steps = 3\n[trainer.optim]\nlr = 3e-4\nbetas = [0.8, 0.9]\n"
        '[[orchestrator.env]]\nid = "a"\nargs = {n = 1}\n[[orchestrator.env]]\nid = "b"\nratio = 2\n',
    )
    assert load(["@", yaml]) == load(["@", toml])
    assert load(["@", yaml]).trainer.optim.lr == 3e-4


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    """Editors of Windows begin a file with it."""
    for suffix, text in (("yaml", "seq_len: 4096\n"), ("toml", "seq_len = 4096\n"), ("json", '{"seq_len": 4096}')):
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert load(["@", str(path)]).seq_len == 4096


def test_base_is_relative_to_its_file_and_lies_below(tmp_path: Path) -> None:
    write(tmp_path / "common" / "base.toml", 'seed = 5\nmax_steps = 9\n[model]\nname = "m"\n')
    path = write(tmp_path / "exp.yaml", "base: common/base.toml\nseed: 6\n")
    experiment = load(["@", path])
    assert (experiment.seed, experiment.max_steps, experiment.model.name) == (6, 9, "m")


def test_bases_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    path = write(tmp_path / "b.yaml", "base: a.yaml\n")
    assert any("circle" in problem and "b.yaml -> a.yaml -> b.yaml" in problem for problem in problems(["@", path]))


def test_interpolation_sees_the_merged_tree_and_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.yaml",
        "seq_len: 512\ninference: {max_model_len: '${seq_len}'}\ntrainer: {micro_batch_tokens: '${seq_len}'}\n"
        "name: '${model.dtype}-${max_steps}'\nseed: '${oc.env:NO_SUCH_VARIABLE_HERE,4}'\n",
    )
    experiment = load(["@", path, "--seq-len", "256", "--orchestrator.sampling.max-tokens", "9"])
    assert experiment.inference is not None
    assert (experiment.inference.max_model_len, experiment.trainer.micro_batch_tokens) == (256, 256)
    assert (experiment.name, experiment.seed) == ("bfloat16-100", 4)


def test_interpolation_through_a_chain_and_of_a_section(tmp_path: Path) -> None:
    text = (
        "seq_len: 512\ninference: {max_model_len: '${seq_len}'}\n"
        "trainer: {micro_batch_tokens: '${inference.max_model_len}'}\n"
        "orchestrator:\n  sampling: {temperature: 0.5, max_tokens: 7}\n  eval: {sampling: '${orchestrator.sampling}'}\n"
    )
    experiment = load(["@", write(tmp_path / "a.yaml", text)])
    assert experiment.trainer.micro_batch_tokens == 512
    assert experiment.orchestrator.eval is not None
    assert experiment.orchestrator.eval_sampling == experiment.orchestrator.sampling
    (problem,) = problems(["@", str(tmp_path / "a.yaml"), "--orchestrator.eval.sampling.temperature", "0"])
    assert "${orchestrator.sampling}" in problem and "as a whole" in problem


def test_interpolation_of_nothing_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "seed: 1\nmax_steps: ${seeed}\n")
    (problem,) = problems(["@", path])
    assert f"{path}:2: max_steps" in problem and "did you mean ${seed}?" in problem


def test_malformed_and_circular_references_are_problems_like_others(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "name: ${seed\nseed: ${max_steps}\nmax_steps: ${seed}\nseq_len: ${}\n")
    found = problems(["@", path, "--orchestrator.sampling.extra", "${orchestrator}"])
    assert len(found) == 5 and all("cannot resolve" in problem for problem in found)
    assert found[0].startswith(f"{path}:")


def test_component_files_load_into_their_sections_and_lift_shared_keys(tmp_path: Path) -> None:
    train = write(
        tmp_path / "train.toml", 'max_steps = 20\n[model]\nname = "m"\n[model.ac]\nfreq = 2\n[optim]\nlr = 0.1\n'
    )
    orch = write(tmp_path / "orch.toml", 'max_steps = 20\nbatch_size = 16\n[[env]]\nid = "reverse-text"\n')
    infer = write(tmp_path / "infer.toml", '[model]\nname = "m"\n[server]\nport = 9\n')
    argv = ["--trainer", "@", train, "--orchestrator", "@", orch, "--inference", "@", infer]
    experiment = load(argv, "rl")
    assert (experiment.max_steps, experiment.model.name, experiment.trainer.optim.lr) == (20, "m", 0.1)
    assert experiment.model.ac is not None and experiment.model.ac.freq == 2
    assert (experiment.orchestrator.batch_size, experiment.orchestrator.env[0].id) == (16, "reverse-text")
    assert experiment.inference is not None and experiment.inference.server.port == 9
    assert load(argv[:-3], "rl").inference is None
    assert load([*argv[:-3], "--inference"], "rl").inference is not None


def test_two_component_files_that_disagree_are_both_named(tmp_path: Path) -> None:
    train = write(tmp_path / "train.toml", "seed = 0\nmax_steps = 20\n")
    orch = write(tmp_path / "orch.toml", 'max_steps = 30\n[[env]]\nid = "reverse-text"\n')
    argv = ["--trainer", "@", train, "--orchestrator", "@", orch]
    (problem,) = problems(argv, "rl")
    assert f"{train}:2" in problem and f"{orch}:1" in problem and "max_steps" in problem
    # A flag decides.
    assert load([*argv, "--max-steps", "5"], "rl").max_steps == 5


def test_two_files_of_one_component_do_not_disagree(tmp_path: Path) -> None:
    first = write(tmp_path / "a.toml", "max_steps = 20\n")
    second = write(tmp_path / "b.toml", "max_steps = 30\n")
    assert load(["--trainer", "@", first, "@", second, *ENV], "rl").max_steps == 30


def test_sections_of_one_file_that_disagree(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "trainer: {max_steps: 2}\n\norchestrator:\n  max_steps: 3\n  env: [{id: x}]\n")
    (problem,) = problems(["@", path], "rl")
    assert f"{path}:1" in problem and f"{path}:4" in problem


def test_component_entrypoints_look_into_their_own_section_first(tmp_path: Path) -> None:
    flags = ["--model.name", "M", "--max-model-len", "2048", "--data-parallel-size", "4", "--server.port", "1"]
    experiment = load(flags, "inference")
    assert experiment.inference is not None
    assert (experiment.inference.max_model_len, experiment.inference.data_parallel_size) == (2048, 4)
    assert (experiment.model.name, experiment.inference.server.port) == ("M", 1)

    experiment = load(["--data.type", "fake", "--data.seq-len", "4096", "--optim.lr", "3", "--bench"], "sft")
    assert (experiment.kind, experiment.sft.data.type, experiment.sft.data.seq_len) == ("sft", "fake", 4096)
    assert (experiment.trainer.optim.lr, experiment.trainer.bench) == (3, True)

    experiment = load(["--optim.lr", "1", "--trainer.optim.eps", "0.5", "--max-steps", "3", "--ckpt.interval", "4"])
    assert (experiment.trainer.optim.lr, experiment.trainer.optim.eps, experiment.max_steps) == (1, 0.5, 3)
    assert experiment.ckpt is not None and experiment.ckpt.interval == 4

    path = write(tmp_path / "exp.yaml", "seed: 4\ninference: {server: {port: 7}}\norchestrator: {batch_size: 8}\n")
    experiment = load(["@", path], "inference")
    assert experiment.inference is not None
    assert (experiment.inference.server.port, experiment.seed, experiment.orchestrator.batch_size) == (7, 4, 8)


def test_a_lone_server_is_not_held_to_the_orchestrators_defaults() -> None:
    experiment = load(["--max-model-len", "128"], "inference")
    assert experiment.inference is not None and experiment.inference.max_model_len == 128


def test_the_entrypoint_decides_the_kind_and_a_file_does_for_submit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "kind: sft\nsft: {data: {type: fake}}\norchestrator: {env: [{id: x}]}\n")
    assert load([path], "submit").kind == "sft"
    assert load(["@", path], "submit").kind == "sft"
    assert load(["@", path], "rl").kind == "rl"


def test_environment_forms() -> None:
    environ = {
        "PRIME_TRAINER__OPTIM__LR": "0.5",
        "PRIME_CKPT": "true",
        "PRIME_CKPT__INTERVAL": "7",
        "PRIME_WANDB": '{"project": "p"}',
        "PRIME_INFERENCE_GPU_IDS": "0,1",
        "PRIMEHPC_MAX_STEPS": "1",
        "PRIME_API_KEY": "somebody else's",
        "HOME": "/",
    }
    experiment = load([], "trainer", environ)
    assert experiment.trainer.optim.lr == 0.5
    assert experiment.ckpt is not None and experiment.ckpt.interval == 7
    assert experiment.wandb is not None and experiment.wandb.project == "p"
    assert (experiment.inference_gpu_ids, experiment.max_steps) == ([0, 1], 100)
    assert load(["--no-ckpt"], "trainer", environ).ckpt is None


def test_keys_of_a_mapping_of_any_keys_are_as_typed_in_a_variable() -> None:
    environ = {
        "PRIME_SLURM__ENV__NCCL_DEBUG": "INFO",
        "PRIME_SLURM__ENV__http_proxy": "h",
        "PRIME_INFERENCE__VLLM__MAX_NUM_SEQS": "4",
        "PRIME_ORCHESTRATOR__SAMPLING__EXTRA__STOP": "a",
        "PRIME_ORCHESTRATOR__ENV__0__ARGS__userId": "7",
        "PRIME_ORCHESTRATOR__ENV__0__ID": "reverse-text",
        "PRIME_ORCHESTRATOR__ENV__0__ARGS__LIMITS__userId": "8",
    }
    experiment = load([], "trainer", environ)
    assert experiment.slurm is not None and experiment.inference is not None
    assert experiment.slurm.env == {"NCCL_DEBUG": "INFO", "http_proxy": "h"}
    assert experiment.inference.vllm == {"max_num_seqs": 4}
    assert experiment.orchestrator.sampling.extra == {"stop": "a"}
    assert experiment.orchestrator.env[0].args == {"userId": 7, "limits": {"userId": 8}}


def test_misspelt_variables() -> None:
    (problem,) = problems([], environ={"PRIME_MODEL__NAEM": "x"})
    assert "PRIME_MODEL__NAEM" in problem and "model.name" in problem
    warnings = load_experiment([], "trainer", {"PRIME_MAX_STEP": "1"}).warnings
    assert len(warnings) == 1 and "PRIME_MAX_STEP" in warnings[0] and "max_steps" in warnings[0]


def test_a_whole_experiment_and_a_file_of_sft_mean_each_their_own_eval(tmp_path: Path) -> None:
    whole = write(tmp_path / "run.yaml", "kind: sft\neval: {num_examples: 5}\nsft: {data: {type: fake}}\n")
    found = load(["@", whole], "sft")
    assert found.eval.num_examples == 5 and found.sft.eval is None
    own = write(tmp_path / "sft.yaml", "data: {type: fake}\neval: {path: held.jsonl, interval: 7}\n")
    found = load(["@", own], "sft")
    assert found.sft.eval is not None and found.sft.eval.interval == 7
    assert "sft.eval" in problems(["@", write(tmp_path / "bad.yaml", "eval: {intervall: 7}\n")], "sft")[0]
    orch = write(tmp_path / "orch.toml", '[[env]]\nid = "reverse-text"\n[eval]\nenvironment_ids = ["math500"]\n')
    assert "`id`: orchestrator.eval.env" in problems(["--orchestrator", "@", orch], "rl")[0], "and not one of kind eval"


def test_no_key_of_a_component_hides_a_shared_one() -> None:
    """Lifting and the per-role snapshots rest on this."""
    shared = {path for path in all_paths() if "." not in path} - set(COMPONENTS)
    for component in COMPONENTS:
        own = {path.split(".")[1] for path in all_paths() if path.startswith(f"{component}.")}
        assert not own & shared, (component, own & shared)


@pytest.mark.parametrize(
    ("entrypoint", "argv"),
    [
        ("rl", [*ENV, "--max-steps", "10", "--ckpt"]),
        ("rl", [*ENV, "--max-steps", "20", "--ckpt.resume-step", "10"]),
        ("rl", [*ENV, "--inference.server.port", "8001", "--orchestrator.client.port", "8001", "--exp-id", "exp-2"]),
        ("rl", [*ENV, "--trainer-gpus", "2", "--inference-gpus", "6", "--wandb", "--bench"]),
        ("rl", [*ENV, "--inference-gpu-ids", "0,1,2,3,4,5", "--trainer-gpu-ids", "6,7"]),
        ("rl", [*ENV, "--orchestrator.client.base-url", "http://h:8000/v1", "--output-dir", "/x"]),
        ("trainer", ["--bench", "--data.fake", "{'micro_batch_size': 8, 'batch_size': 128, 'seq_len': 128}"]),
        ("orchestrator", [*ENV, "--bench"]),
        ("trainer", ["--ckpt.resume_step", "10"]),
        ("inference", ["--api-key", "secret", "--gpu-memory-utilization", "0.5", "--tensor-parallel-size", "4"]),
        ("inference", ["--data-parallel-address", "10.15.42.1", "--data-parallel-start-rank", "2", "--headless"]),
        ("sft", ["--data.type", "fake", "--bench", "--wandb.project", "p", "--wandb.name", "n"]),
        (
            "sft",
            ["--data.seq-len", "4096", "--data.batch-size", "64", "--data.micro-batch-size", "2", *FAKE, "--bench"],
        ),
        ("sft", ["--data.type", "fake", "--data.length", "variable", "--max-steps", "20", "--ckpt"]),
        ("sft", ["--data.path", "d.jsonl", "--data.seq-len", "4096"]),
        ("sft", ["--data.name", "owner/name", "--data.columns", '{"prompt": "question"}', "--eval.interval", "5"]),
        ("sft", ["--data.path", "d.jsonl", "--max-steps", "40", "--ckpt.resume-step", "20", "--model.ac"]),
    ],
)
def test_command_lines_of_the_reference_pages(entrypoint: str, argv: list[str]) -> None:
    load(argv, entrypoint)


def test_the_log_levels_variable_is_no_misspelt_key(tmp_path: Path) -> None:
    config = tmp_path / "e.yaml"
    config.write_text("seed: 1\n")
    loaded = load_experiment(["@", str(config)], "trainer", {"PRIME_LOG_LEVEL": "DEBUG", "PRIME_ASYNC_LEVL": "1"})
    assert len(loaded.warnings) == 1 and "PRIME_ASYNC_LEVL" in loaded.warnings[0]


def test_a_word_beside_a_list_is_read_back_from_the_snapshot(tmp_path: Path) -> None:
    """`eval.steps` is a list or the word `all`; the snapshot of a run holds the default."""
    path = tmp_path / "exp.yaml"
    for text, expected in (("all", "all"), ("[10, 20]", [10, 20]), ('"10,20"', [10, 20])):
        path.write_text(
            f"kind: eval\nname: e\neval: {{environment_ids: [reverse-text], weights_dir: w, steps: {text}}}\n"
        )
        section = load(["@", str(path)], "submit").eval
        assert section is not None and section.steps == expected
