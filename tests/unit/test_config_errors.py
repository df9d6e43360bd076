"""What a user is told: file, line, key, what is wrong, the nearest valid key; everything at once."""

import os
from pathlib import Path

import pytest

from prime_hpc import cli
from prime_hpc.config import ConfigError, Experiment, load_experiment
from prime_hpc.config.errors import nearest_path
from prime_hpc.config.schema import all_paths, resolve
from prime_hpc.config.sources import other_names
from prime_hpc.config.sources.files import dump_yaml, parse_toml, parse_yaml
from prime_hpc.config.sources.flags import ALIASES


def problems(argv: list[str], entrypoint: str = "trainer", environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_experiment(argv, entrypoint, environ or {})
    assert caught.value.exit_code == 2
    return [str(problem) for problem in caught.value.problems]


def of_file(path: Path, text: str, entrypoint: str = "trainer") -> list[str]:
    path.write_text(text)
    return problems(["@", str(path)], entrypoint)


def test_unknown_key_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    (problem,) = of_file(path, "seed: 1\n\norchestrator:\n  rollout_per_example: 4\n")
    assert problem == (
        f"{path}:4: orchestrator.rollout_per_example: unknown key; did you mean orchestrator.rollouts_per_example?"
    )


def test_unknown_key_in_toml_and_through_an_optional_section(tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    (problem,) = of_file(path, "seed = 1\n[model.ac]\nfrequency = 2\n")
    assert problem.startswith(f"{path}:3: model.ac.frequency: unknown key; did you mean model.ac.freq")


def test_unknown_key_in_a_list_of_sections(tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    text = '[[orchestrator.env]]\nid = "a"\n[[orchestrator.env]]\nid = "b"\nration = 3\n'
    (problem,) = of_file(path, text)
    assert problem.startswith(
        f"{path}:5: orchestrator.env.1.ration: unknown key; did you mean orchestrator.env.1.ratio?"
    )


def test_unknown_flag_names_the_full_path() -> None:
    assert "--trainer.optim.lr?" in problems(["--lr", "3"], "rl")[0]
    assert "--max-steps?" in problems(["--max-step", "3"])[0]
    assert "--trainer.optim.max-norm?" in problems(["--optim.max-nrom", "3"])[0]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (
            "sampling:\n  max_tokens: 8\nrollouts_per_example: 4\n",
            ["orchestrator.sampling", "orchestrator.rollouts_per_example"],
        ),
        ("kind: eval\nrollouts_per_example: 4\n", ["eval.rollouts_per_example"]),
        ("num_examples: 4\nrollouts_per_example: 4\n", ["eval.num_examples", "eval.rollouts_per_example"]),
        ("tensor_parallel_size: 2\nserver:\n  port: 0\n", ["inference.tensor_parallel_size", "inference.server"]),
        ("num_ranks: 2\noptim:\n  lr: 1.0\n", ["trainer.num_ranks", "trainer.optim"]),
    ],
)
def test_a_file_of_one_role_that_was_given_as_a_whole_experiment(tmp_path: Path, text: str, meant: list[str]) -> None:
    found = of_file(tmp_path / "exp.yaml", text, "plan")
    assert [problem.partition("did you mean ")[2] for problem in found] == [f"{key}?" for key in meant]


@pytest.mark.parametrize("argv", [["--orchestrator.env.².id", "x"], ["--network.port-range", "²-³"]])
def test_digits_that_are_no_number(argv: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_experiment(["--orchestrator.env.0.id", "x", *argv], "rl", {})
    assert "invalid literal" not in str(refused.value)


def test_no_far_fetched_suggestion() -> None:
    (problem,) = problems(["--zzzzqqq", "3"])
    assert problem.endswith("unknown key")
    for typed in ("qqqq.zzzz", "trainer.nope", "nope", "promptly", "ckpt.every", "model.path", "max_length"):
        assert nearest_path(typed, all_paths()) is None
    for typed, meant in (("data.path", "sft.data.path"), ("evaluate", "eval"), ("max_stps", "max_steps")):
        assert nearest_path(typed, all_paths()) == meant


def test_names_of_other_suites_are_answered_with_ours(tmp_path: Path) -> None:
    (problem,) = problems(["--num-generations", "8"], "rl")
    assert problem.endswith("there is no such key: replies to a prompt: --orchestrator.rollouts-per-example")
    (problem,) = problems(["--trainer.optim.learning-rate", "1e-5"], "rl")
    assert problem.endswith("it is --trainer.optim.lr")
    for text, ours in (
        ("inference: {parallel: {tp: 2}}", "inference.tensor_parallel_size"),  # the nearest word would be the trainer's
        ("orchestrator: {group_size: 8}", "orchestrator.rollouts_per_example"),  # and not the batch
        ("trainer: {model: {impl: custom}}", "one implementation"),
        ("model: {vlm: {freeze_vision_encoder: true}}", "model.vision"),
        ("slurm: {gpus: 8}", "slurm.gpus_per_node"),
        ("orchestrator: {environment: {id: reverse-text}}", "orchestrator.env of RL"),  # and not an evaluation's ids
        ("weight_broadcast: {type: nccl}", "weights.transport"),
        ("deployment: {type: single_node, num_train_gpus: 2}", "trainer.num_ranks"),
        ("orchestrator: {monitor: {wandb: {id: abc}}}", "wandb.orchestrator_id"),
        ("orchestrator: {wandb: {log_extras: {interval: 5}}}", "wandb.samples_interval"),
        ("inference: {model: {tool_call_parser: hermes}}", "below inference.vllm"),
    ):
        (problem,) = of_file(tmp_path / "other.yaml", text, "rl")
        assert "there is no such " in problem and ours in problem
    role = tmp_path / "infer.toml"
    role.write_text("[parallel]\ndp = 2\n")
    (problem,) = problems(["--inference", "@", str(role)], "rl")
    assert problem.endswith("engines: inference.data_parallel_size"), "and not the trainer's section of that name"
    text = "orchestrator:\n  env:\n  - id: a\n    max_assistant_turns: 3\n"
    (problem,) = of_file(tmp_path / "turns.yaml", text, "rl")
    assert problem.endswith("turns are limited in an item of orchestrator.env: `max_turns`")
    (problem,) = of_file(tmp_path / "beside.yaml", "orchestrator:\n  env:\n  - {id: rows, reward: mine.py:f}\n", "rl")
    assert problem.endswith("arguments are below `args`: {id: rows, args: {reward: ...}}")


def test_a_section_of_another_suite_is_answered_key_by_key(tmp_path: Path) -> None:
    text = """\
actor_rollout_ref:
  actor:
    optim: {lr: 1e-6}
    fsdp_config: {param_offload: true}
  rollout: {n: 5, zzzzqqq: 3}
trainr: {num_ranks: 2}
"""
    path = tmp_path / "exp.yaml"
    found = of_file(path, text, "rl")
    assert found[0] == f"{path}:1: actor_rollout_ref: there is no such section; what its keys are here:"
    assert found[1] == f"{path}:3: actor_rollout_ref.actor.optim.lr: unknown key; did you mean trainer.optim.lr?"
    assert "fsdp_config: there is no such key: FSDP2 shards always: trainer.parallel.dp_shard" in found[2]
    assert "rollout.n: there is no such key: replies to a prompt: orchestrator.rollouts_per_example" in found[3]
    assert found[4] == f"{path}:6: trainr: unknown key; did you mean trainer?"
    assert len(found) == 5, "a section that is misspelt is one problem, a key that nobody has none"


def test_an_argument_of_vllm_is_told_its_place(tmp_path: Path) -> None:
    (problem,) = problems(["--max-num-batched-tokens", "8192"], "inference")
    assert problem.endswith("unknown key; an argument of vLLM would be --inference.vllm.max-num-batched-tokens")
    (problem,) = of_file(tmp_path / "exp.yaml", "teacher_inference: {block_size: 16}\n", "rl")
    assert problem.endswith("an argument of vLLM would be teacher_inference.vllm.block_size")


def test_a_section_that_is_given_a_name_is_told_its_key() -> None:
    said = problems(["--model", "M"], "inference")
    assert said == [
        "command line (M): unexpected argument 'M': --model is a section of keys; did you mean `--model.name M`?"
    ]
    assert "--key value" in problems(["M"], "inference")[0]
    assert "a value of --sft.data.type" in problems(["--data.fake", "{'batch_size': 2}"], "sft")[0]


def test_answers_to_other_names_are_true() -> None:
    answers = [*(answer for _, answer in other_names._ANYWHERE), *other_names._AS_TYPED.values()]
    for key in (key for answer in answers for key in other_names._KEY.findall(answer)):
        assert resolve(tuple(key.split("."))) is not None, key
    names = [name for several, _ in other_names.rows() for name in several]
    assert len(names) == len(set(names)), "one answer a name"
    ours = {*all_paths(), *ALIASES}
    assert not ours & set(names), "no key, no alias of ours"


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("trainer.loss.type", "dapo", "it is ppo_clip with trainer.loss.clip_high = 0.28"),
        ("trainer.loss.type", "geo_mean", "it is gmpo"),
        ("trainer.loss.type", "luspo", "it is gspo with trainer.loss.normalize = batch and batch_tokens = 1"),
        ("trainer.loss.type", "Clip-Cov", "it is ppo_clip, or any other objective, with trainer.loss.covariance"),
        ("trainer.loss.type", "IcePop", "it is trainer.loss.correction, beside any objective: type = mask"),
        ("orchestrator.advantage.type", "gspo", "it is an objective, trainer.loss.type"),
        (
            "orchestrator.advantage.type",
            "reinforce-plus-plus",
            "it is dr_grpo with orchestrator.advantage.scale = batch",
        ),
        ("trainer.loss.type", "dro", "it is reinforce with trainer.loss.kl of target = behaviour, estimator = k2"),
        ("orchestrator.advantage.type", "grpo_passk", "it is pkpo, with orchestrator.advantage.pass_k"),
        ("orchestrator.advantage.type", "VAPO", "it is gae, with trainer.critic"),
        ("orchestrator.advantage.type", "normalize_then_sum", "it is gdpo, with orchestrator.advantage.scale = batch"),
    ],
)
def test_algorithms_by_the_names_that_others_give_them(key: str, name: str, said: str) -> None:
    (problem,) = problems([f"--{key}", name], "rl")
    assert said in problem and "did you mean" not in problem and "known are" in problem


def test_unknown_key_of_a_component_file(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("[optim]\nlearning_rat = 3\n")
    (problem,) = problems(["--trainer", "@", str(path)])
    assert f"{path}:2: optim.learning_rat" in problem


def test_two_documents_in_one_file(tmp_path: Path) -> None:
    (problem,) = of_file(tmp_path / "exp.yaml", "name: a\n---\nname: b\n")
    assert problem.endswith("exp.yaml:2: a second document begins (`---`): one file is one experiment")


def test_the_key_that_is_meant_is_one_of_the_kind(tmp_path: Path) -> None:
    (tmp_path / "eval.yaml").write_text("kind: eval\n")
    for kind, wanted in (([], "--orchestrator.sampling.temperature"), (["eval.yaml"], "--eval.sampling.temperature")):
        words = [word for name in kind for word in ("@", str(tmp_path / name))]
        with pytest.raises(ConfigError, match=f"did you mean {wanted}"):
            load_experiment([*words, "--sampling.temperature", "1"], "plan", {})


@pytest.mark.parametrize(
    ("text", "line", "key", "said"),
    [
        ("seed: 1\nmax_steps: ten\n", 2, "max_steps", "expected an integer, got 'ten'"),
        ("max_steps: 1.5\n", 1, "max_steps", "expected an integer, got 1.5"),
        ("max_steps: true\n", 1, "max_steps", "expected an integer, got true"),
        (
            "orchestrator:\n  rollouts_per_example: [1, 4]\n",
            2,
            "orchestrator.rollouts_per_example",
            "expected an integer, got [1, 4]; one for each environment: orchestrator.env.0.rollouts_per_example, ...",
        ),
        ("max_steps: 0\n", 1, "max_steps", "must be greater than or equal to 1, got 0"),
        ("model:\n  dtype: fp8\n", 2, "model.dtype", "expected one of float32, bfloat16, float16, got 'fp8'"),
        ("model:\n  - a\n", 1, "model", "expected a section of keys"),
        ("model:\n  compile: maybe\n", 2, "model.compile", "expected true or false, got 'maybe'"),
        ("name: 3\n", 1, "name", "expected text, got 3 (in quotes it is text)"),
        ("name: '${oc.env:NO_SUCH_VARIABLE}'\n", 1, "name", "NO_SUCH_VARIABLE is not set in this shell; export it"),
        ("name: a/b\n", 1, "name", "cannot name a directory"),
        ("inference_gpu_ids: {a: 1}\n", 1, "inference_gpu_ids", "expected a list (an integer) or null"),
        ("ckpt:\n  keep_last: first\n", 2, "ckpt.keep_last", "expected an integer or null, got 'first'"),
        ("trainer:\n  optim:\n    betas: [1, 2, 3]\n", 3, "trainer.optim.betas", "expected a list of 2 (a number)"),
        (
            "orchestrator:\n  client:\n    base_url: 5\n",
            3,
            "orchestrator.client.base_url",
            "expected a list (text) or text",
        ),
        ("orchestrator:\n  env:\n    - ratio: 2\n", 3, "orchestrator.env.0.id", "must be stated"),
        ("orchestrator:\n  env:\n    id: x\n", 2, "orchestrator.env", "[[orchestrator.env]]"),
        ("inference:\n  vllm: 3\n", 2, "inference.vllm", "expected a mapping, got 3"),
    ],
)
def test_wrong_values(tmp_path: Path, text: str, line: int, key: str, said: str) -> None:
    path = tmp_path / "exp.yaml"
    (problem,) = of_file(path, text)
    assert problem.startswith(f"{path}:{line}: {key}: ")
    assert said in problem


def test_relations_between_keys_say_where_each_is_stated(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    text = "orchestrator:\n  batch_size: 10\n  rollouts_per_example: 4\n  env: [{id: x}]\n"
    (problem,) = of_file(path, text, "rl")
    assert "must be a multiple" in problem and f"{path}:2" in problem and f"{path}:3" in problem


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--orchestrator.rollouts-per-example", "1"], "must be at least 2"),
        (["--orchestrator.sampling.max-tokens", "100", "--seq-len", "100"], "a prompt: lower it, or raise seq_len"),
        (["--trainer.micro-batch-tokens", "10"], "would not fit"),
    ],
)
def test_impossible_experiments(argv: list[str], said: str) -> None:
    (problem,) = problems(["--orchestrator.env", '[{"id": "x"}]', *argv], "rl")
    assert said in problem


def test_the_common_group_may_be_of_one_where_every_environment_has_its_own() -> None:
    own = '[{"id": "x", "rollouts_per_example": 4}, {"id": "y", "rollouts_per_example": 2}]'
    argv = ["--orchestrator.rollouts-per-example", "1", "--orchestrator.env"]
    assert load_experiment([*argv, own], "rl", {}).experiment.orchestrator.group_size(1) == 2
    (problem,) = problems([*argv, own.replace(', "rollouts_per_example": 2', "")], "rl")
    assert "orchestrator.env.1: grpo compares rollouts" in problem and "advantage.type = none" in problem


def test_rl_without_environments_and_sft_without_data() -> None:
    assert "orchestrator.env" in problems([], "rl")[0]
    assert "sft.data.path" in problems([], "sft")[0]


def test_everything_at_once_and_no_consequences(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text("sead: 1\nmax_steps: ten\norchestrator:\n  batch_size: 4\n  rollout_per_example: 4\n")
    found = problems(["@", str(path), "@", str(tmp_path / "no.yaml"), "--lr", "3"], "rl", {"PRIME_MODEL__NAEM": "x"})
    assert len(found) == 6, found
    assert not any("multiple" in problem for problem in found)  # follows from the misspelt key


def test_render_is_one_line_or_a_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment(["--sead", "1"], "trainer", {})
    assert caught.value.render().startswith("error: command line (--sead): sead: unknown key")
    with pytest.raises(ConfigError) as caught:
        load_experiment(["--sead", "1", "--lrr", "2"], "trainer", {})
    assert caught.value.render().startswith("error: 2 problems in the configuration\n  command line")


def test_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "reverse_text.yaml").write_text("")
    (problem,) = problems(["@", str(tmp_path / "reverse_tex.yaml")])
    assert "no such file" in problem and "has reverse_text.yaml" in problem
    (tmp_path / "pyproject.toml").touch()
    assert problems(["@", str(tmp_path / "infer.toml")])[0].endswith("no such file"), "an end alone is no likeness"
    assert "reverse_text.yaml" in problems([f"@{tmp_path}/reverse_text.toml"])[0]
    assert "does not exist" in problems(["@", str(tmp_path / "no" / "such" / "a.yaml")])[0]
    assert "is a directory" in problems(["@", str(tmp_path)])[0]
    (tmp_path / "a.txt").write_text("")
    assert "must end in" in problems(["@", str(tmp_path / "a.txt")])[0]


def test_a_tab_is_told_as_one(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    for text in ("model:\n\tname: a\n", "# é\nmodel:\n  name: a\n\tdtype: float32\n"):
        (problem,) = of_file(path, text)
        assert problem == f"{path}:{text.count(chr(10))}: a tab, where YAML is indented with spaces"


def test_a_sweep_is_told_as_one(tmp_path: Path) -> None:
    file = tmp_path / "my sweep.yaml"
    said = of_file(file, "experiment: exp.yaml\naxes: {product: {seed: [1, 2]}}\nthrottle: 2\n", "submit")
    told = f"{file}: is a sweep, not an experiment: `prime-hpc sweep submit '{file}' --dry-run` checks it"
    assert said[0].startswith(told) and not any("unknown key" in line for line in said)


def test_missing_base_says_who_asked(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    (problem,) = of_file(path, "seed: 1\nbase: common.yaml\n")
    assert problem.startswith(f"{path}:2: {tmp_path}/common.yaml: no such file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text("")
    path.chmod(0)
    assert "Permission denied" in problems(["@", str(path)])[0]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "seed: 1\nmodel: {name: x\nmax_steps: 3\n", 3),
        ("a.yaml", "seed: 1\n\tmodel: 1\n", 2),
        ("a.yaml", "- 1\n- 2\n", 1),
        ("a.yaml", "seed: 1\nname: a\nseed: 2\n", 3),
        ("a.yaml", "seed: &a\n  b: *a\n", 2),
        ("a.yaml", "seed: !!python/object:os.system {}\n", 1),
        ("a.toml", "seed = 1\nname = \n", 2),
        ("a.toml", "seed = 1\n[model\n", 2),
    ],
)
def test_syntax_errors_have_a_line(tmp_path: Path, name: str, text: str, line: int) -> None:
    path = tmp_path / name
    (problem,) = of_file(path, text)
    assert problem.startswith(f"{path}:{line}: ")


def test_toml_key_stated_twice(tmp_path: Path) -> None:
    (problem,) = of_file(tmp_path / "a.toml", "seed = 1\nseed = 2\n")
    assert "seed" in problem and "TOML" in problem


def test_lines_of_toml() -> None:
    text = (
        'a = 1\n"b" = """\nx = 2\n"""\n[t]\n  c.d = 3 # e = 4\n[[t.l]]\nf = 1\n[[t.l]]\nf = [\n 1,\n]\n[t.l.g]\nh = 1\n'
    )
    _, lines = parse_toml(text, "x.toml")
    assert lines[("a",)] == 1 and lines[("b",)] == 2 and ("x",) not in lines
    assert lines[("t", "c", "d")] == 6
    assert (lines[("t", "l", "0", "f")], lines[("t", "l", "1", "f")], lines[("t", "l", "1", "g", "h")]) == (8, 10, 14)


def test_yaml_scalars() -> None:
    data, lines = parse_yaml(
        "a: 1e-6\nb: 2024-01-01\non: [1, .5, -2E3]\nc: 'x'\n1: yes\nd: {<<: {e: 1}, f: 2}\n", "x.yaml"
    )
    assert data == {
        "a": 1e-6,
        "b": "2024-01-01",
        "on": [1, 0.5, -2000.0],
        "c": "x",
        "1": True,
        "d": {"e": 1, "f": 2},
    }
    assert lines[("on",)] == 3 and lines[("on", "1")] == 3 and lines[("d", "f")] == 6


@pytest.mark.parametrize(
    "value", ["1e-6", "1e5", "2024-01-01", "on", "null", "", "a: b", "1.", "${x}", "é", "-", 1e-6, 1e22, -0.5]
)
def test_yaml_round_trip_of_scalars(value: object) -> None:
    data, _ = parse_yaml(dump_yaml({"k": value}), "x.yaml")
    assert data == {"k": value} and type(data["k"]) is type(value)


def test_an_empty_section_states_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model:\n  # name: x\ntrainer:\ninference:\n  vllm:\norchestrator:\n  env:\n")
    experiment = load_experiment(["@", str(path)], "trainer", {}).experiment
    assert experiment.model == Experiment().model and experiment.inference is not None


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("orchestrator:\n  env:\n    - id: a\n      args: {p: {{question}}}\n", 4, "needs quotes"),
        ("seed: 1\n? [a, b]\n: 2\n", 2, "needs quotes"),
        ("seed: 1\nseq_len: 0x_\n", 2, "'0x_'"),
        ("seed: 1\nseq_len: !!float x\n", 2, "'x'"),
        ("seed: 1\nname: !!bool x\n", 2, "'x'"),
        ("seed: 1\nmodel: !!map [a]\n", 2, "mapping"),
    ],
)
def test_yaml_that_parses_and_means_nothing_is_told_with_its_line(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    (problem,) = problems(["@", str(path)])
    assert problem.startswith(f"{path}:{line}:") and said in problem


def test_a_group_of_one_is_refused_by_the_config_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "exp.yaml"
    file.write_text("orchestrator: {rollouts_per_example: 1, env: [{id: reverse-text}]}\n")
    assert cli.main(["lint", str(file)]) == 2
    assert "PH000" in capsys.readouterr().out


def test_what_is_wrong_with_one_key_is_said_once_with_its_place() -> None:
    (empty,) = problems(["--name", ""], "rl")
    assert empty.startswith("command line (--name): name: is empty")
    (slash,) = problems(["--name", "a/b"], "rl")
    assert slash.endswith("no slash, no line break or other control character")
    (backend,) = problems(["--inference.max-model-len", "64", "--inference.backend", "x"], "rl")
    assert backend.endswith("your own is `module:ATTRIBUTE`")


def test_a_config_of_another_kind_is_told_apart_where_anything_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "warm_up.yaml"
    kind, lacking = of_file(path, "seed: 1\nkind: sft\nsft: {data: {type: fake}}\n", "rl")
    assert kind == f"{path}:2: kind: is sft, not rl: `prime-hpc sft` or `prime-hpc submit` runs it"
    assert "no environment" in lacking
    (lacking,) = of_file(path, "kind: rl\n", "rl")
    assert "no environment" in lacking


@pytest.mark.parametrize(
    ("key", "entrypoint"),
    [
        ("model.name", "rl"),
        ("output_dir", "rl"),
        ("ckpt.path", "rl"),
        ("sft.data.path", "sft"),
        ("sft.data.cache_dir", "sft"),
    ],
)
def test_a_path_of_a_user_who_is_not_there_is_named_with_its_key(key: str, entrypoint: str) -> None:
    found = problems([f"--{key}", "~no-such-user-here/x"], entrypoint)
    assert f"command line (--{key}): {key}: ~no-such-user-here/x: a path begins with ~NAME" in found[0], found
    assert len(found) == 1 and found[0].endswith("write the path out")
