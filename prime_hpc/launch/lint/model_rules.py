"""Lint of the model against its parallelism, its lengths, its routers and the memory of the GPUs."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import MODELS, sampling_role, trained_names
from prime_hpc.config.families import OWN_EXPERTS, VISION_ALONE, Family, family_of, rotary_problem, with_text_part
from prime_hpc.inference.vllm.backend import UNSERVED_FAMILIES
from prime_hpc.launch.checks import adapter_problems, left_whole, read_vocabulary, trained_models
from prime_hpc.launch.estimate.engine_memory import engine_memory, vocab_fits
from prime_hpc.launch.estimate.model_facts import ModelFacts
from prime_hpc.launch.estimate.trainer_memory import trainer_gib
from prime_hpc.launch.lint.lint_finding import EVERY, TRAINING, Finding, Severity, Subject, rule
from prime_hpc.launch.reward_models import reward_models
from prime_hpc.store.model.config import SAVE_TOKENIZER, find_config, has_tokenizer, is_local_path, read_config

REPLAY, DTYPE = "trainer.router_replay", "model.router_dtype"
OTHER_ROUTERS = frozenset({"deepseek_v4", "phimoe", "zaya"})
"""model_type of those whose routers do not choose by one `topk` over all experts (`tests/unit/test_router_families.py`
tries every family of the installed transformers); besides those whose experts are their own code (OWN_EXPERTS)."""


@rule(*EVERY, pods=True)
def tensor_parallel(subject: Subject) -> Iterator[Finding]:
    """vLLM refuses to split heads and vocabulary unevenly, after minutes of start-up."""
    for group in subject.engines:
        if group.facts is not None and group.servers.tensor_parallel_size > 1:
            yield from _split(group.facts, group.servers.tensor_parallel_size, f"{group.section}.tensor_parallel_size")


@rule(*EVERY, pods=True)
def pipeline(subject: Subject) -> Iterator[Finding]:
    """Report a stage without a layer: vLLM refuses it, after the start of every process."""
    for group in subject.engines:
        stages = group.servers.pipeline_parallel_size
        if group.facts is not None and stages > group.facts.num_layers:
            yield Finding.error(
                "PH123",
                f"{group.section}.pipeline_parallel_size",
                f"{stages} stages are more than the model's {group.facts.num_layers} layers",
                f"at most {group.facts.num_layers}",
            )


def _split(facts: ModelFacts, width: int, key: str) -> Iterator[Finding]:
    good = [n for n in range(1, facts.num_heads + 1) if facts.num_heads % n == 0 and _kv_fits(facts.num_kv_heads, n)]
    good = [n for n in good if vocab_fits(facts.vocab_size, n)]
    remedy = f"use one of {', '.join(map(str, good))}"
    if facts.num_heads % width:
        yield Finding.error(
            "PH101", key, f"{width} does not divide the model's {facts.num_heads} attention heads", remedy
        )
    if not _kv_fits(facts.num_kv_heads, width):
        yield Finding.error(
            "PH102",
            key,
            f"the model's {facts.num_kv_heads} key-value heads can be neither split nor repeated over {width} GPUs",
            remedy,
        )
    if not vocab_fits(facts.vocab_size, width):
        yield Finding.error(
            "PH103",
            key,
            f"the vocabulary of {facts.vocab_size}, padded to a multiple of 64, cannot be split over {width} GPUs",
            remedy,
        )


def _kv_fits(num_kv_heads: int, width: int) -> bool:
    return num_kv_heads % width == 0 if width <= num_kv_heads else width % num_kv_heads == 0


@rule(*EVERY, pods=True)
def context(subject: Subject) -> Iterator[Finding]:
    """Positions that the model was not made for."""
    experiment, facts = subject.experiment, subject.facts
    if facts is None or facts.context is None:
        return
    wanted = {"seq_len": experiment.seq_len} if experiment.trains else _stated_length(experiment)
    if subject.is_rl and experiment.inference is not None:
        wanted["inference.max_model_len"] = experiment.max_model_len
    if experiment.kind == "sft" and experiment.sft.data.seq_len:
        of_engines = wanted if experiment.samples else {}
        wanted = of_engines | {"sft.data.seq_len": experiment.sft.data.seq_len}
    for key, tokens in wanted.items():
        if tokens > facts.context and not (key != "seq_len" and tokens == experiment.seq_len):
            yield Finding.error(
                "PH104",
                key,
                f"{tokens} tokens are beyond the model's max_position_embeddings = {facts.context}",
                f"use at most {facts.context}",
            )


def _stated_length(experiment: Experiment) -> dict[str, int]:
    """Key -> what the engines of a run without a trainer are asked to hold; unstated, the model's context bounds it."""
    if experiment.inference is None:
        return {}
    key = "inference.max_model_len" if experiment.inference.max_model_len else "seq_len"
    is_stated = key != "seq_len" or "seq_len" in experiment.model_fields_set
    return {key: experiment.max_model_len} if is_stated else {}


@rule(*EVERY, pods=True)
def context_of_others(subject: Subject) -> Iterator[Finding]:
    """Check what a teacher's and a judge's engines are asked to hold against their models."""
    for group in subject.engines:
        limit = group.facts.context if group.facts is not None else None
        if group.role != "inference" and limit is not None and group.view.max_model_len > limit:
            stated = getattr(subject.experiment, group.section).max_model_len is not None
            key = f"{group.section}.max_model_len" if stated or group.role == "judge" else "seq_len"
            yield Finding.error(
                "PH104",
                key,
                f"the {group.role}'s engines need {group.view.max_model_len} tokens, beyond {group.view.model.name}'s "
                f"max_position_embeddings = {limit}",
                f"a seq_len of at most {limit - 1}" if key == "seq_len" else f"use at most {limit}",
            )


@rule(*EVERY, pods=True)
def known(subject: Subject) -> Iterator[Finding]:
    """Return whether there is a config.json to check against."""
    loads = subject.experiment.trains or subject.experiment.inference is not None  # an API's model is nowhere here
    if subject.facts is None and loads:
        yield _unknown("model.name", subject.experiment.model.name)
    for group in subject.engines:
        if group.role != "inference" and group.facts is None:
            yield _unknown(MODELS[group.role], group.view.model.name)


def _unknown(key: str, name: str) -> Finding:
    severity: Severity = "info"
    remedy = "lint again where the model is"
    if find_config(name) is not None:
        message = f"the config.json of {name} is of a kind that lint does not know"
    elif is_local_path(name):
        path, severity = os.path.expanduser(name), "warning"  # noqa: PTH111 - EACCES: no
        if os.path.isfile(path):  # noqa: PTH113
            message, severity = f"{name} is a file, where a model is a directory", "error"
            remedy = "name the directory that holds its config.json"
        else:
            message = f"{name} {'holds no config.json' if os.path.isdir(path) else 'is not there (yet)'}"  # noqa: PTH112
    else:
        message = f"{name} is not in the hub's cache of this machine"
        above = name.partition("/")[0]
        if above != name and os.path.isdir(above):  # noqa: PTH112
            message, severity = f"{message}, and the directory {above} holds none of that name", "warning"
    return Finding(
        "PH107",
        severity,
        key,
        f"{message}: heads, vocabulary, context and memory were not checked",
        remedy,
    )


@rule(*EVERY, pods=True)
def tokenizer(subject: Subject) -> Iterator[Finding]:
    """Report weights without a tokenizer: of some families transformers makes one up that encodes text as nothing."""
    names = {"model.name": subject.experiment.model.name}
    names |= {MODELS[group.role]: group.view.model.name for group in subject.engines if group.role != "inference"}
    for key, name in names.items():
        if is_local_path(name) and find_config(name) is not None and _is_without_tokenizer(Path(name).expanduser()):
            yield Finding.warning("PH130", key, f"{name} holds weights, and no tokenizer", SAVE_TOKENIZER)


def _is_without_tokenizer(folder: Path) -> bool:
    try:
        if has_tokenizer(folder) or not any(folder.glob("*.safetensors")):
            return False
        own = folder / "tokenizer_config.json"  # its code may read files of any name
        return not own.is_file() or "auto_map" not in own.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False  # the start says it


@rule(*TRAINING, pods=True)
def precision(subject: Subject) -> Iterator[Finding]:
    """Report precisions that need loss scaling, which the trainer has not, or that the family's code does not take."""
    if subject.experiment.model.dtype == "float16":
        yield Finding.error(
            "PH108",
            "model.dtype",
            "float16 gradients underflow without loss scaling, which the trainer does not have",
            "use bfloat16 or float32",
        )
        return
    name = subject.experiment.model.name
    family = family_of(read_config(name) or {})
    if problem := family.dtype_problem(subject.experiment.model.dtype):
        yield Finding.error("PH108", "model.dtype", f"{name}: {problem}", "use float32")


@rule(*TRAINING, pods=True)
def trainer_memory(subject: Subject) -> Iterator[Finding]:
    """State, activations and logits against one GPU."""
    limit = subject.gpu_gib("trainer")
    if subject.facts is None or limit is None:
        return
    parts = trainer_gib(subject.experiment, subject.facts)
    if parts is None:
        return
    total = sum(parts.values())
    if total <= 0.9 * limit:
        return
    shown = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
    remedies = {
        "state": "more trainer.num_ranks",
        "activations": "--model.ac (recompute), or a smaller trainer.micro_batch_tokens",
        "logits": "a smaller trainer.logits_chunk_tokens",
        "scores": "--model.ac (recompute), or a shorter seq_len: attention keeps seq_len squared scores a head",
        "gathered": "trainer.reshard_after_forward = true, or a smaller model",
        "gradients": "trainer.no_sync = false, or more of trainer.parallel.tp or ep",
    }
    # activations are the rough part of the estimate: they alone refuse a run only when they are far off
    longest = (subject.experiment.sft.data.seq_len if not subject.is_rl else None) or subject.experiment.seq_len
    if subject.experiment.micro_batch_tokens == longest * (1 if subject.is_rl else subject.experiment.sft.num_sides):
        shorter = "a shorter seq_len: a micro-batch is one sample of it already"
        remedies |= {"activations": f"--model.ac (recompute), or {shorter}"}
        shown = f"with micro-batches of one sample of {longest} tokens: {shown}"
    certain = total - parts["activations"] - parts["logits"] - parts.get("scores", 0.0)
    worst = max(remedies, key=lambda name: parts.get(name, 0.0))
    yield Finding(
        "PH105",
        "error" if certain > limit or total > 2 * limit else "warning",
        "trainer.num_ranks" if worst == "state" else "trainer.micro_batch_tokens",
        f"a trainer GPU needs about {total:.0f} GiB ({shown}) and has {limit:.0f}",
        remedies[worst],
    )


@rule(*EVERY, pods=True)
def engines(subject: Subject) -> Iterator[Finding]:
    """Weights and the KV cache of one longest sample against one GPU: vLLM does not start below that."""
    for group in subject.engines:
        limit = subject.gpu_gib(group.role)
        memory = engine_memory(group.view, group.facts, limit) if group.facts is not None else None
        if limit is None or memory is None or memory.kv_gib is None or memory.max_tokens is None:
            continue
        needed = group.view.max_model_len
        if memory.max_tokens >= needed:
            continue
        quantized = "quantization" in group.servers.vllm  # fewer bytes than this counts
        yield Finding(
            "PH106",
            "error" if memory.kv_gib <= 0 and not quantized else "warning",
            f"{group.section}.tensor_parallel_size",
            f"an engine's GPU of {limit:.0f} GiB holds {memory.weights_gib:.1f} GiB of weights, which leaves a KV "
            f"cache of {memory.max_tokens} tokens: less than one sample of max_model_len = {needed}",
            f"a larger {group.section}.tensor_parallel_size or gpu_memory_utilization, or a shorter max_model_len",
        )


@rule(*EVERY, pods=True)
def adapters(subject: Subject) -> Iterator[Finding]:
    """Targets and rank of `model.lora` against the shapes of the stored weights."""
    problems = adapter_problems(subject.experiment)
    for problem in problems:
        yield Finding.error("PH113", problem.key, problem.message, "")
    missed = left_whole(subject.experiment) if subject.experiment.trains and not problems else []
    if missed:
        yield Finding.info(
            "PH113",
            "model.lora.target_modules",
            f"the usual targets miss {', '.join(missed)} of {subject.experiment.model.name}: these get no adapter",
            "name them too, if they should",
        )


@rule(*EVERY, pods=True)
def scores(subject: Subject) -> Iterator[Finding]:
    """Reward models where replies are needed, judges of the other kind than their runner, and reward models that no
    engine will serve once they are trained."""
    for problem in reward_models(subject.experiment):
        yield Finding.error("PH131", problem.key, problem.message, "")
    name = subject.experiment.model.name
    kind = with_text_part(read_config(name) or {}).get("model_type")
    if subject.experiment.trains_reward_model and kind in UNSERVED_FAMILIES:
        said = f"{name} ({kind}): vLLM, which alone serves reward models, serves none of its kind"
        yield Finding.warning("PH131", "model.name", said, "begin with another model, or score by transformers alone")


@rule(*TRAINING, pods=True)
def weights(subject: Subject) -> Iterator[Finding]:
    """Quantised weights, and weights that are not of their config."""
    for problem in trained_models(subject.experiment):
        yield Finding.error("PH118", problem.key, problem.message, "")


@rule(*TRAINING, pods=True)
def families(subject: Subject) -> Iterator[Finding]:
    """How the model's family trains: packed, one sample a row, or not at all."""
    experiment, parallel = subject.experiment, subject.experiment.trainer.parallel
    choice = experiment.trainer.rows
    for key, name in trained_names(experiment).items():
        config = read_config(name)
        if config is None:
            continue
        family = family_of(config)
        if family.refused:
            yield Finding.error("PH119", key, f"{name}: {family.refusal}", "use another model")
            continue
        yield from _unknown_family(key, name, config, family, trusted=experiment.model.trust_remote_code)
        if problem := rotary_problem(config, experiment.context):
            yield Finding.error("PH121", key, f"{name}: {problem}", "use another model, or a shorter context")
        try:
            rows = family.rows_as(choice)
        except ValueError as error:
            yield Finding.error("PH119", "trainer.rows", f"{name}: {error}", "leave it out")
            continue
        if rows != "single":
            continue
        scores = ", and attention holds all its scores in memory" if family.custom_attention else ""
        message = f"{name} trains one sample a row, padded to the longest, without shared prompts{scores}: "
        wanted = family.rows == "packed"  # and not the family's way
        yield Finding.info(
            "PH119",
            "trainer.rows" if wanted else key,
            message + (family.reason or "trainer.rows says so"),
            "leave it out: packed rows are faster" if wanted else "nothing: it is exact, and slower than packed rows",
        )
        if parallel.cp > 1:
            message = f"{name} trains one sample a row, which context-parallel ranks cannot split"
            yield Finding.error("PH119", "trainer.parallel.cp", message, "set it to 1")


def _unknown_family(
    key: str, name: str, config: Mapping[str, Any], family: Family, *, trusted: bool
) -> Iterator[Finding]:
    """Report a model that transformers may not know: the trainer would say so once it runs."""
    if family.known or not family.model_type or family.model_type in VISION_ALONE:  # of these: `vision_rules`
        return
    code = config.get("auto_map")
    own = code.get("AutoModelForCausalLM") if isinstance(code, Mapping) else None
    if own is not None and trusted:
        return  # a self-test at every start finds out what it does
    message = f"{name}: transformers has no causal language model of model_type {family.model_type} of its own"
    remedy = "model.trust_remote_code: true, if you trust the code that it ships" if own else "another model"
    yield Finding.warning("PH119", key, message, f"{remedy}; nothing, where a newer transformers is installed")


@rule("sft", pods=True)
def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Report a tokenizer that knows tokens which the model has no embedding of: a row that holds one is refused."""
    facts, name = subject.facts, subject.experiment.model.name
    if facts is None:
        return
    try:
        known = read_vocabulary(name) or {}
    except ValueError:
        return  # the start says it
    beyond = sorted(token for token, number in known.items() if number >= facts.vocab_size)
    if beyond:
        shown = ", ".join(map(repr, beyond[:3]))
        yield Finding.warning(
            "PH128",
            "model.name",
            f"the tokenizer of {name} has {len(beyond)} tokens beyond the model's {facts.vocab_size} embeddings "
            f"({shown}): a row that holds one cannot be trained on",
            "resize the model's embeddings (resize_token_embeddings of transformers), if your data holds them",
        )


@rule(*EVERY, pods=True)
def layout(subject: Subject) -> Iterator[Finding]:
    """One process answers for all data-parallel engines of a server; only experts that are shared out need that."""
    for group in subject.engines:
        servers, facts = group.servers, group.facts
        is_group = servers.across_nodes == "engine_group" or servers.headless
        dense = facts is not None and not facts.num_experts
        if dense and servers.data_parallel_size > 1 and not is_group and subject.gpu_gib(group.role) is not None:
            total = servers.num_replicas * servers.data_parallel_size
            yield Finding.info(
                "PH122",
                f"{group.section}.data_parallel_size",
                f"one HTTP process serves {servers.data_parallel_size} engines of a dense model: with short "
                "completions it, not the GPUs, is what limits them",
                f"{group.section}.num_replicas: {total} and data_parallel_size: 1: each engine gets its own server",
            )


@rule(*EVERY, pods=True)
def router_dtype(subject: Subject) -> Iterator[Finding]:
    """Report a dense model: it has no routers."""
    facts, model = subject.facts, subject.experiment.model
    if model.router_dtype != "float32":
        return
    kind = (read_config(model.name) or {}).get("model_type")
    if kind in OWN_EXPERTS:
        yield Finding.error("PH127", DTYPE, f"routers of {kind} are of a kind that is not known here", "leave it out")
    elif facts is not None and not facts.num_experts:
        yield Finding.error("PH127", DTYPE, f"{model.name} has no experts, so no routers", "leave it out")


@rule(*TRAINING, pods=True)
def router_replay(subject: Subject) -> Iterator[Finding]:
    """Report where no engine of the run can record what the trainer is to follow, and where following it would help."""
    experiment, facts = subject.experiment, subject.facts
    name, is_moe = experiment.model.name, facts is not None and bool(facts.num_experts)
    family = (read_config(name) or {}).get("model_type")
    if not experiment.trainer.router_replay:
        if (
            subject.is_rl
            and is_moe
            and family not in OTHER_ROUTERS | OWN_EXPERTS
            and experiment.model.dtype != "float32"
        ):
            yield Finding.info(
                "PH127",
                REPLAY,
                f"in {experiment.model.dtype} engine and trainer send some tokens of {name} to other experts: their "
                "importance ratios are off by more than rounding",
                f"true: the trainer follows the engine's choice; and {DTYPE} = float32",
            )
        return
    if not subject.is_rl:
        yield Finding.error("PH127", REPLAY, "only rollouts of RL have recorded experts", "leave it out")
    elif facts is not None and not is_moe:
        yield Finding.error("PH127", REPLAY, f"{name} has no experts, so nothing to follow", "leave it out")
    elif family in OTHER_ROUTERS | OWN_EXPERTS:
        yield Finding.error("PH127", REPLAY, f"routers of {family} choose in a way of their own", "leave it out")
    elif experiment.model.lora is not None:
        yield Finding.error("PH127", REPLAY, "engines with adapters record no experts", "leave it or model.lora out")
    elif sampling_role(experiment) == "teacher":
        yield Finding.error("PH127", REPLAY, "a teacher samples the rollouts, by routers of its own", "leave it out")
