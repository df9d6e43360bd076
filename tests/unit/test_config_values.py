"""A value means the same wherever it is stated, and what cannot be meant is refused."""

import json
import re
from pathlib import Path

import pytest

from prime_hpc.config import ConfigError, Experiment, load_experiment, load_run, write_snapshot

ENV = ["--orchestrator.env", '[{"id": "reverse-text"}]']


def load(argv: list[str], entrypoint: str = "rl", environ: dict[str, str] | None = None) -> Experiment:
    return load_experiment([*(ENV if entrypoint == "rl" else []), *argv], entrypoint, environ or {}).experiment


def refused(argv: list[str], words: str, entrypoint: str = "rl", environ: dict[str, str] | None = None) -> None:
    with pytest.raises(ConfigError, match=words):
        load(argv, entrypoint, environ)


def file_(folder: Path, text: str, name: str = "exp.yaml") -> list[str]:
    (folder / name).write_text(text)
    return ["@", str(folder / name)]


@pytest.mark.parametrize("section", ["env", "eval.env"])
def test_two_environments_of_one_label_are_refused(section: str) -> None:
    envs = '[{"id": "a"}, {"id": "b", "name": "a"}]'
    refused([f"--orchestrator.{section}", envs], "two environments are called a; give one of them a name")
    load([f"--orchestrator.{section}", '[{"id": "a"}, {"id": "a", "name": "b"}]'])


def test_a_file_is_no_environment_and_the_message_says_how_to_name_it() -> None:
    words = r"orchestrator\.env\.0\.id: .* write chess, with .* \(PYTHONPATH=envs/mine before .* slurm\.env\.PYTHONPATH"
    refused(["--orchestrator.env", '[{"id": "envs/mine/chess.py"}]'], words)
    load(["--orchestrator.env", '[{"id": "games.chess"}]'])


def test_a_reference_is_of_its_keys_type_whatever_stated_it(tmp_path: Path) -> None:
    args = 'n: "${seq_len}", d: "${trainer.deterministic}", lr: "${trainer.optim.lr}", ids: "${trainer_gpu_ids}"'
    text = (
        f'orchestrator: {{env: [{{id: a, args: {{{args}}}}}], sampling: {{max_tokens: 24}}}}\nname: "x-${{seq_len}}"\n'
    )
    path = file_(tmp_path, text)
    flags = ["--seq-len", "64", "--trainer.deterministic", "false", "--trainer.optim.lr", "1e-5"]
    ranks = ["--trainer-gpu-ids", "0,1"]
    expected = {"n": 64, "d": False, "lr": 1e-5, "ids": [0, 1]}
    one = load_experiment([*path, *flags, *ranks], "rl", {}).experiment
    assert one.orchestrator.env[0].args == expected and type(one.orchestrator.env[0].args["n"]) is int
    assert one.name == "x-64"
    environ = {
        "PRIME_SEQ_LEN": "64",
        "PRIME_TRAINER__DETERMINISTIC": "false",
        "PRIME_TRAINER__OPTIM__LR": "1e-5",
        "PRIME_TRAINER_GPU_IDS": "0,1",
    }
    assert load_experiment(path, "rl", environ).experiment.orchestrator.env[0].args == expected


@pytest.mark.parametrize("text", ["12.10", "1e3", "0x10", "false", "none", "[1,2]", "'quoted'", "010"])
def test_texts_of_a_mapping_of_texts_stay_as_they_were_typed(text: str) -> None:
    exp = load(["--slurm.env.A", text, "--kubernetes.requests.cpu", text, "--kubernetes.image", "i"])
    assert exp.slurm.env == {"A": text}
    assert exp.kubernetes is not None and exp.kubernetes.requests == {"cpu": text}
    assert load([], environ={"PRIME_SLURM__ENV__A": text}).slurm.env == {"A": text}


def test_what_is_no_text_says_so(tmp_path: Path) -> None:
    refused(file_(tmp_path, "slurm: {env: {A: false}}\n"), r"slurm\.env\.A: expected text, got false")


def test_a_shell_line_and_its_arguments_are_cut_at_none_of_their_commas() -> None:
    lines = ["export NCCL_IB_HCA=mlx5_0,mlx5_1", "[ -f x ] && source x", "module load a, b"]
    for line in lines:
        assert load(["--slurm.setup", line]).slurm.setup == [line]
    assert load(["--slurm.setup", '["a, b", "c"]']).slurm.setup == ["a, b", "c"]
    assert load(["--slurm.srun-args=--cpu-bind=map_cpu:0,1,--exact"]).slurm.srun_args == [
        "--cpu-bind=map_cpu:0,1",
        "--exact",
    ]
    for text, modules in (
        (r".*layers\.\d{1,2}\.q_proj,v_proj", [r".*layers\.\d{1,2}\.q_proj", "v_proj"]),
        ("[qk]_proj", ["[qk]_proj"]),
    ):
        lora = load(["--model.lora.target-modules", text]).model.lora
        assert lora is not None and lora.target_modules == modules


def test_a_list_whose_quotes_the_shell_took_is_refused() -> None:
    refused(["--orchestrator.client.base-url", "[http://a/v1,http://b/v1]"], "neither JSON nor Python")
    for text in ("[q_proj,v_proj]", '["q_proj","v_proj"'):
        refused(["--model.lora.target-modules", text], "neither JSON nor Python")
    refused(["--orchestrator.env", "[{id: rows}]"], "neither JSON nor Python: names and texts in it need quotes")


@pytest.mark.parametrize("text", ["(0)", "(None)"])
def test_a_value_in_brackets_alone_is_no_list(text: str) -> None:
    refused(["--trainer-gpu-ids", text], re.escape(f"expected a list (an integer) or null, but {text!r} is none"))


def test_elements_of_a_list_may_be_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIST_OF_TEST", "a")
    assert load(["--slurm.setup", r"export X=\${HOME}, y"]).slurm.setup == ["export X=${HOME}, y"]
    assert load(["--trainer-gpu-ids", "0,${async_level}", "--async-level", "3"]).trainer_gpu_ids == [0, 3]
    flags = ["--inference-gpu-ids", "${trainer_gpu_ids}", "--trainer-gpu-ids", "0,1"]
    assert load([*flags, "--inference"]).inference_gpu_ids == [0, 1]
    url = ["--orchestrator.client.base-url"]
    assert load([*url, "http://${oc.env:LIST_OF_TEST,b}/v1"]).orchestrator.client.base_url == "http://a/v1"
    urls = load([*url, "http://${oc.env:LIST_OF_TEST}/v1,http://b/v1"]).orchestrator.client.base_url
    assert urls == ["http://a/v1", "http://b/v1"]


def test_integers(tmp_path: Path) -> None:
    assert load(["--max-steps", "1e3"]).max_steps == 1000
    refused(["--inference", "--inference-gpu-ids", "0-3"], "write 0,1,2,3")
    refused(["--seed", "0-3"], "'0-3' is no integer")
    refused(["--inference", "--inference-gpu-ids", "0,-1"], "different positions from 0 on")
    refused(["--inference", "--inference-gpu-ids", "0,0"], "different positions from 0 on")
    refused(file_(tmp_path, "trainer_gpu_ids: ['0-3']\n"), "different positions from 0 on")


def test_a_bare_off_of_yaml_is_the_word(tmp_path: Path) -> None:
    assert load(file_(tmp_path, "slurm: {restart: {how: off}}\n")).slurm.restart.how == "off"
    refused(file_(tmp_path, "slurm: {restart: {how: on}}\n"), "got true")


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.name", ""],
        ["--output-dir", ""],
        ["--ckpt.path", ""],
        ["--ckpt.resume-step", ""],
        ["--orchestrator.env.0.id", ""],
    ],
)
def test_the_text_of_a_variable_that_is_not_set_names_nothing(flags: list[str]) -> None:
    refused(flags, "is empty")


@pytest.mark.parametrize("key", ["slurm.env.HOME", "slurm.setup", "output-dir", "model.name"])
def test_null_is_no_text(key: str, tmp_path: Path) -> None:
    refused([f"--{key}", "null"], "got null")
    assert load(file_(tmp_path, "slurm: {env: {HOME: 'null'}}\n")).slurm.env == {"HOME": "null"}


def test_an_empty_text_is_a_text_where_it_names_nothing() -> None:
    exp = load(["--slurm.env.name", "", "--alarms.rules", '[{"metric": "trainer.kl", "above": 1, "name": ""}]'])
    assert exp.slurm.env == {"name": ""} and exp.alarms.rules[0].title == "trainer.kl"


def test_an_empty_text_counts_where_it_wins_and_is_null_where_that_may_be(tmp_path: Path) -> None:
    path = file_(tmp_path, f"name: mine\noutput_dir: {tmp_path}\nmodel: {{name: m}}\nwandb: {{name: ''}}\n")
    environ = {"PRIME_NAME": "", "PRIME_OUTPUT_DIR": "", "PRIME_MODEL__NAME": ""}
    exp = load(path, environ=environ)
    assert (exp.name, exp.output_dir, exp.model.name) == ("mine", tmp_path, "m")
    assert exp.wandb is not None and exp.wandb.name is None
    assert load(["--orchestrator.client.base-url", ""]).orchestrator.client.base_url is None
    refused([], "name: .*is empty", environ={"PRIME_NAME": ""})


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    refused(["--model.name", "a\udcff"], "cannot be written as UTF-8")
    refused(file_(tmp_path, '{"orchestrator": {"env": [{"id": "a", "args": {"x": "\\ud83d"}}]}}', "a.json"), "UTF-8")


def test_json_that_yaml_cannot_read(tmp_path: Path) -> None:
    texts = {"smile": "\U0001f600", "k" * 1100: 1}
    path = file_(tmp_path, json.dumps({"orchestrator": {"env": [{"id": "a", "args": texts}]}}, indent="\t"), "a.json")
    assert load_experiment(path, "rl", {}).experiment.orchestrator.env[0].args == texts
    refused(file_(tmp_path, '{"seed": 1,\t"seed": 2}', "b.json"), "stated twice|YAML")


def test_a_base_of_two_files_lies_below_both(tmp_path: Path) -> None:
    file_(tmp_path, "max_steps: 10\nseed: 100\n", "d.yaml")
    file_(tmp_path, "base: d.yaml\nmax_steps: 20\n", "b.yaml")
    file_(tmp_path, "base: d.yaml\nseed: 200\n", "c.yaml")
    exp = load(file_(tmp_path, "base: [b.yaml, c.yaml]\n", "a.yaml"))
    assert (exp.max_steps, exp.seed) == (20, 200)
    assert load(file_(tmp_path, "base: [b.yaml, d.yaml]\n", "a.yaml")).max_steps == 10, "named last, it wins"
    assert load(file_(tmp_path, "base: [d.yaml, b.yaml]\n", "a.yaml")).max_steps == 20


def test_what_a_base_says_is_no_conflict_once_it_is_overridden(tmp_path: Path) -> None:
    file_(tmp_path, "max_steps: 20\n", "base.yaml")
    trainer = ["--trainer", *file_(tmp_path, "base: base.yaml\nmax_steps: 30\n", "t.yaml")]
    orchestrator = ["--orchestrator", *file_(tmp_path, "max_steps: 30\n", "o.yaml")]
    assert load([*trainer, *orchestrator]).max_steps == load([*orchestrator, *trainer]).max_steps == 30
    orchestrator = ["--orchestrator", *file_(tmp_path, "max_steps: 20\n", "o.yaml")]
    refused([*trainer, *orchestrator], "one experiment has one max_steps")
    refused([*orchestrator, *trainer], "one experiment has one max_steps")


def test_the_root_of_a_file_and_its_sections_do_not_disagree(tmp_path: Path) -> None:
    for text in ("max_steps: 10\ntrainer: {max_steps: 20}\n", "trainer: {max_steps: 20}\nmax_steps: 10\n"):
        path = file_(tmp_path, text)
        refused(path, "the root states 10")
        assert load([*path, "--max-steps", "5"]).max_steps == 5
    file_(tmp_path, "max_steps: 10\n", "base.yaml")
    assert load(file_(tmp_path, "base: base.yaml\ntrainer: {max_steps: 20}\n")).max_steps == 20


def test_what_is_the_same_in_other_words_is_no_conflict(tmp_path: Path) -> None:
    text = """
seq_len: 512
max_steps: 10
output_dir: outputs
wandb:
trainer: {max_steps: '10', output_dir: ./outputs, seq_len: 512.0, wandb: {project: p}}
orchestrator: {seq_len: "${inference.max_model_len}", max_steps: "${async_level}", sampling: {max_tokens: 24}}
inference: {max_model_len: 512}
"""
    exp = load(file_(tmp_path, f"{text}async_level: 10\n"))
    assert (exp.seq_len, exp.max_steps) == (512, 10) and exp.wandb is not None and exp.wandb.project == "p"
    refused(file_(tmp_path, f"{text}async_level: 9\n"), "one experiment has one max_steps")


def test_a_shape_decides_over_what_files_say(tmp_path: Path) -> None:
    text = "seq_len: 512\norchestrator: {max_steps: 9, sampling: {max_tokens: 24}}\nslurm:\n  shapes:\n"
    text += "    - {name: wide, overrides: {trainer.seq_len: 256, trainer: {max_steps: 5}}}\n"
    exp = load([*file_(tmp_path, text), "--slurm.shape", "wide"])
    assert (exp.seq_len, exp.max_steps) == (256, 5)


def test_variables_of_others_are_no_key_of_a_server() -> None:
    environ = {"PRIME_API_KEY": "pit_abcdefgh", "PRIME_BASE_URL": "x", "PRIME_TEAM_ID": "t", "PRIME_INFERENCE_URL": "u"}
    loaded = load_experiment([], "inference", environ)
    assert loaded.experiment.inference is not None and loaded.experiment.inference.api_key is None
    assert loaded.warnings == []
    engines = load([], "inference", {"PRIME_INFERENCE__API_KEY": "k" * 8}).inference
    assert engines is not None and engines.api_key is not None and engines.api_key.reveal() == "k" * 8


def test_a_secrets_file_may_be_named_by_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.key").write_text("hush-hush")
    (tmp_path / "run.key").chmod(0o600)
    monkeypatch.setenv("KEYS_OF_TEST", str(tmp_path))
    monkeypatch.setenv("KEY_OF_TEST", "by-variable")
    for stated in ("@${oc.env:KEYS_OF_TEST}/run.key", "@${name}.key"):
        key = load(file_(tmp_path, f"slurm: {{env: {{HF_TOKEN: '{stated}'}}}}\n")).slurm.env["HF_TOKEN"]
        assert not isinstance(key, str) and key.reveal() == "hush-hush"
    path = file_(tmp_path, "slurm: {env: {HF_TOKEN: '${oc.env:KEY_OF_TEST}'}}\n")
    Path(path[1]).chmod(0o644)
    assert load_experiment([*ENV, *path], "rl", {}).warnings == []


def test_a_shells_variable_is_told_from_a_reference(tmp_path: Path) -> None:
    path = file_(tmp_path, 'slurm: {setup: ["export X=${NO_SUCH}/foo"]}\n')
    refused(path, r"exp.yaml:1: slurm.setup.0: .*own shell has \$NO_SUCH or \\\$\{NO_SUCH\}$")


def test_a_dry_run_is_told_where_it_is() -> None:
    """As a key of a file; `rl` has a flag of that name."""
    refused(["--dry-run"], "rl @ FILE --dry-run")


def test_a_config_as_a_flag_is_told_how_it_is_given() -> None:
    refused(["--config", "exp.yaml"], "a config file is given as `@ FILE`")


@pytest.mark.parametrize("entrypoint", ["rl", "submit"])
def test_a_key_without_its_dashes_is_no_file(entrypoint: str) -> None:
    refused(["trainer.optim.lr=1e-6"], "flags are `--key value` or `--key=value`", entrypoint)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--learning-rate", "it is --trainer.optim.lr"),
        ("--num-train-epochs", "--sft.data.num-epochs"),
        ("--max-length", "is --seq-len"),
        ("--gradient-accumulation-steps", "--sft.data.batch-size"),
        ("--data.mixture", "--sft.data.probabilities"),
    ],
)
def test_flags_of_other_trainers_are_told_what_is_meant(flag: str, words: str) -> None:
    refused([flag, "2"], words, "sft")


def test_servers_that_a_run_would_not_ask_are_refused() -> None:
    url = ["--orchestrator.client.base-url", "http://a:1/v1"]
    refused(["--inference", *url], "orchestrator.client.base_url: attaches to servers that run")
    assert load(["--inference", *url, "--orchestrator.client.base-url", "none"]).inference is not None
    assert load([*ENV, "--inference", *url], "orchestrator").inference is not None  # by hand, from the file of all
    refused(["--inference.headless"], "inference.headless: a run's servers serve HTTP")
    assert load(["--headless"], "inference").inference is not None


def test_a_part_of_a_group_of_engines_is_no_more_than_the_group() -> None:
    size = ["--data-parallel-size", "4"]
    refused([*size, "--data-parallel-size-local", "8"], "local .8. is more than data_parallel_size .4.", "inference")
    refused([*size, "--data-parallel-start-rank", "4"], "start_rank .4. is no rank", "inference")


@pytest.mark.parametrize(
    ("flags", "entrypoint"),
    [
        (["--orchestrator.advantage.timeout-reward", "nan"], "rl"),
        (["--orchestrator.env.0.ratio", "inf"], "rl"),
        (["--trainer.loss.kl.coef", "inf"], "rl"),
        (["--alarms.rules", '[{"metric": "trainer.kl", "above": NaN}]'], "rl"),
        (["--trainer.dist-timeout-s", "inf"], "rl"),
        (["--orchestrator.env.0.timeout-s", "inf"], "rl"),
        (["--inference.kv-cache-gib", "inf"], "rl"),
        (["--data.num-epochs", "inf", "--data.path", "rows.jsonl"], "sft"),
        (["--environment-ids", "a", "--min-reward", "nan"], "synthesize"),
        (["--environment-ids", "a", "--pass-threshold", "nan"], "eval"),
    ],
)
def test_figures_that_are_compared_are_finite(flags: list[str], entrypoint: str) -> None:
    refused(flags, "finite number", entrypoint)


@pytest.mark.parametrize(
    ("key", "entrypoint"),
    [
        ("orchestrator.client.base_url", "rl"),
        ("orchestrator.teacher.base_url", "rl"),
        ("eval.client.base_url", "eval"),
        ("synthesize.client.base_url", "synthesize"),
    ],
)
def test_addresses_of_servers_are_some(key: str, entrypoint: str) -> None:
    taught = ["--orchestrator.advantage.type", "opd", "--orchestrator.env", '[{"id": "reverse-text"}]']
    flags = ["--environment-ids", "a"] if entrypoint in ("eval", "synthesize") else taught * ("teacher" in key)
    for text in ("localhost:8000/v1", "http:///v1", "http://a b/v1", "ftp://a/v1", "http://a:x/v1"):
        refused(
            [*flags, f"--{key}={text}"], f"{key}: .*is no address of a server: write http://host:port/v1", entrypoint
        )
    for text in ("http://a:8000", "https://api.a.com/v1", "http://[::1]:8000/v1"):
        load([*flags, f"--{key}={text}"], entrypoint)
    if "teacher" not in key:
        host = key.replace("base_url", "host")
        refused([*flags, f"--{host}=::1"], f"{host}: 'http://::1:8000/v1' is no address of a server", entrypoint)


def test_a_seed_is_one_that_torch_takes() -> None:
    refused(["--seed", str(10**20)], "seed: must be less than")
    assert load(["--seed", str(2**63 - 1)]).seed == 2**63 - 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"orchestrator": {"env": [{"id": "a"}, {"id": "a"}], "sampling": {"max_tokens": 9}}}, "two environments"),
        ({"inference_gpu_ids": [0, 0], "inference": {"data_parallel_size": 2}}, "different positions"),
        ({"inference": {}, "orchestrator": {"client": {"base_url": "http://a:1/v1"}}}, "attaches to servers"),
        ({"inference": {"data_parallel_size": 2, "data_parallel_size_local": 4}}, "is more than"),
        ({"alarms": {"rules": [{"metric": "trainer.kl", "above": float("inf")}]}}, "finite number"),
        ({"seed": 2**33}, ""),
    ],
)
def test_what_an_earlier_version_took_goes_on(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    orchestrator = {"env": [{"id": "reverse-text"}], **changes.pop("orchestrator", {})}  # type: ignore[dict-item]
    stated = {"name": "r", "output_dir": tmp_path, "launch": "local", "orchestrator": orchestrator, **changes}
    experiment = Experiment.model_validate(stated)
    write_snapshot(experiment, tmp_path / "r", ["rl"])
    assert load_run(tmp_path / "r") == experiment
    run_yaml = [str(tmp_path / "r" / "run.yaml")]
    assert load_experiment(run_yaml, "submit", {}, is_begun=True).experiment.seed == experiment.seed
    if words:
        refused(run_yaml, words, "submit")
