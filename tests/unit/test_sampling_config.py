"""What may be said of sampling: for training what the trainer can follow, for evaluation what vLLM can do."""

from typing import Any

import pytest

from prime_hpc.config import ConfigError, Experiment, load_experiment
from prime_hpc.config.sections.sampling import (
    CHANGES,
    HARMLESS,
    SET_ELSEWHERE,
    EvalSamplingConfig,
    SamplingConfig,
    of_distribution,
)
from prime_hpc.inference.transformers.limits import refusals


def resolved(*argv: str) -> Experiment:
    environments = ("--orchestrator.env", "[{'id': 'reverse-text'}]")
    return load_experiment(["--seq-len", "16384", *environments, *argv], "rl", {}).experiment


def problem(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(*argv)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], (0.0, 512)),
        (["--orchestrator.sampling.max-tokens", "8192"], (0.0, 8192)),
        (["--orchestrator.eval.sampling.max-tokens", "1024"], (0.0, 1024)),
        (["--orchestrator.eval.sampling.temperature", "0.6"], (0.6, 512)),
        (["--orchestrator.sampling.temperature", "0.7", "--orchestrator.sampling.top-p", "0.9"], (0.0, 512)),
    ],
)
def test_evaluation_is_greedy_and_as_long_as_training_where_it_says_nothing(argv: list[str], expected: tuple) -> None:
    sampling = resolved("--orchestrator.eval", *argv).orchestrator.eval_sampling
    assert (sampling.temperature, sampling.max_tokens) == expected
    assert not sampling.truncates


def test_a_refusal_names_the_level_that_states_it() -> None:
    assert "orchestrator.sampling.extra.logit_bias cannot" in problem(
        "--orchestrator.sampling.extra", "{'logit_bias': {'1': 5}}"
    )
    own = "[{'id': 'reverse-text', 'sampling': {'extra': {'logit_bias': {'1': 5}}}}]"
    assert "orchestrator.env.0.sampling.extra.logit_bias cannot" in problem("--orchestrator.env", own)


def test_what_vllm_is_asked_for() -> None:
    assert SamplingConfig().parameters() == {"temperature": 1.0, "max_tokens": 512}
    stated = SamplingConfig(temperature=0.7, top_p=0.95, top_k=20, min_p=0.1, extra={"stop": ["x"]})
    assert stated.parameters() == {
        "temperature": 0.7, "max_tokens": 512, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "stop": ["x"],
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(SET_ELSEWHERE))
@pytest.mark.parametrize("kind", [SamplingConfig, EvalSamplingConfig])
def test_extra_does_not_repeat_what_has_a_key_of_its_own(kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"must not hold {name}: "):
        kind(extra={name: 1})


def test_a_parameter_twice_is_told_with_its_key() -> None:
    found = problem("--orchestrator.sampling.extra", "{'temperature': 0.5}")
    assert "orchestrator.sampling.extra" in found and "state it as `temperature`" in found


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty cannot be used in training: the trainer cannot compute"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias cannot be used in training"),
        ({"min_tokens": 4}, "min_tokens cannot be used in training"),
        ({"seed": 3}, "all rollouts of a prompt are the same"),
        ({"bad_words": ["a"]}, "bad_words cannot be used in training"),
        ({"something_new": 1}, "it is not known to leave the distribution as it is"),
    ],
)
def test_what_the_trainer_cannot_follow_is_refused_for_training_alone(extra: dict[str, Any], reason: str) -> None:
    assert reason in problem("--orchestrator.sampling.extra", repr(extra))
    resolved("--orchestrator.eval.sampling.extra", repr(extra))
    teacher = ("--orchestrator.advantage.type", "sft", "--orchestrator.teacher.base-url", "http://a:1/v1")
    resolved("--trainer.loss.type", "nll", *teacher, "--orchestrator.sampling.extra", repr(extra))


def test_vllm_has_no_parameter_that_is_in_no_table_and_passes_over_others() -> None:
    from pydantic import TypeAdapter
    from vllm import SamplingParams

    made = TypeAdapter(SamplingParams).validate_python({"stopp": ["x"]})
    assert not hasattr(made, "stopp")
    of_prompts = {"prompt_logprob_token_ids", "prompt_logprob_start", "routed_experts_prompt_start"}
    its_own = {name for name in SamplingParams.__struct_fields__ if name.startswith("_")}
    its_own |= {"output_text_buffer_length", "skip_clone"}
    assert set(SamplingParams.__struct_fields__) <= {*CHANGES, *HARMLESS, *SET_ELSEWHERE, *of_prompts, *its_own}


def test_neutral_and_harmless_parameters_train() -> None:
    neutral = {name: values[0] for name, values in CHANGES.items()}
    assert not SamplingConfig(extra=neutral | dict.fromkeys(HARMLESS, True)).untrainable()


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", "0.001"), ("temperature", "2.5"), ("top-p", "0"), ("top-k", "0"), ("min-p", "2")]
)
def test_values_that_vllm_would_refuse_or_change(key: str, value: str) -> None:
    assert f"orchestrator.sampling.{key.replace('-', '_')}" in problem(f"--orchestrator.sampling.{key}", value)


def test_a_teacher_scores_the_whole_vocabulary() -> None:
    teacher = ("--orchestrator.advantage.type", "opd", "--orchestrator.teacher.base-url", "http://a:1/v1")
    assert "over the whole vocabulary" in problem(*teacher, "--orchestrator.sampling.top-p", "0.9")


def test_replies_of_an_evaluation_leave_room_for_a_prompt() -> None:
    found = problem("--orchestrator.eval.sampling.max-tokens", "16384")
    assert "orchestrator.eval.sampling.max_tokens (16384) cannot fit" in found


@pytest.mark.parametrize(
    ("entrypoint", "section"),
    [
        ("rl", "orchestrator.env.0"),
        ("rl", "orchestrator.eval.env.0"),
        ("eval", "eval.env.0"),
        ("synthesize", "synthesize.env.0"),
    ],
)
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("extra", "{'n': 4}", "must not hold n"), ("temperature", "0.005", "vLLM samples at no temperature between")],
)
def test_what_one_environment_states_is_held_to_the_same(
    entrypoint: str, section: str, key: str, value: str, words: str
) -> None:
    argv = ["--orchestrator.env.0.id", "wordle"] if entrypoint == "rl" else []
    argv += [f"--{section}.id", "wordle", f"--{section}.sampling.{key}", value]
    with pytest.raises(ConfigError, match=words) as refused:
        load_experiment(argv, entrypoint, {})
    assert refused.value.problems[0].key == f"{section}.sampling.{key}"


@pytest.mark.parametrize(
    ("entrypoint", "section"),
    [
        ("rl", "orchestrator"),
        ("rl", "orchestrator.env.0"),
        ("rl", "orchestrator.eval.env.0"),
        ("eval", "eval"),
        ("synthesize", "synthesize.env.0"),
    ],
)
def test_what_the_transformers_backend_cannot_do_is_refused_wherever_it_is_stated(
    entrypoint: str, section: str
) -> None:
    env = ("--orchestrator.env.0.id", "wordle") if entrypoint == "rl" else (f"--{entrypoint}.env.0.id", "wordle")
    argv = [*env, *(("--orchestrator.eval.env.0.id", "wordle") if "eval.env" in section else ())]
    extra = "{'repetition_detection': {'max_pattern_size': 3}}"
    experiment = load_experiment([*argv, f"--{section}.sampling.extra", extra], entrypoint, {}).experiment
    (refusal,) = refusals(experiment)
    assert refusal.key == f"{section}.sampling.extra" and "repetition_detection" in refusal.reason


def test_what_tokens_are_drawn_from() -> None:
    off: dict[str, Any] = {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "seed": None,
        "logit_bias": {},
    }
    assert of_distribution({"temperature": 0.5, "max_tokens": 9, "stop": ["x"], **off}) == {"temperature": 0.5}
    own = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1}
    assert of_distribution(own) == own
