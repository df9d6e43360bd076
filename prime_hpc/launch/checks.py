"""Checks before anything starts: the model, the environments, the data."""

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from prime_hpc.config import ConfigError, Experiment, Loaded, Problem
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import MODELS, SECTIONS, engine_roles, served_by, trained_names
from prime_hpc.config.env_files import READERS, named_files, short_id
from prime_hpc.config.families import STORED_AS
from prime_hpc.config.sections.lora import DEFAULT_TARGETS, HEADS, last_names, matches, select_modules
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.sections.standalone_eval import StandaloneEnvConfig
from prime_hpc.envs.benchmarks.registry import BENCHMARKS, find_benchmark
from prime_hpc.envs.bundled_arguments import argument_names, env_argument_names, taskset_module
from prime_hpc.envs.env_config import BUNDLED, IN_PROCESS
from prime_hpc.evals.versions import ADAPTER_CONFIG
from prime_hpc.inference import environment
from prime_hpc.inference.backend import load_backend, refusals_of
from prime_hpc.launch.estimate.model_facts import read_model, stored_shapes
from prime_hpc.launch.first_rows import SKIP_ROWS, wrong_row, wrong_rows_arguments
from prime_hpc.launch.reward_models import reward_models
from prime_hpc.launch.storage import WEIGHT_SUFFIXES, storage_problems
from prime_hpc.runtime.device import planned_device
from prime_hpc.store.dataset.files import NothingThereError, find_data, first_columns, has_columns, missing_columns
from prime_hpc.store.io import zstd
from prime_hpc.store.model import files as stored
from prime_hpc.store.model.config import SAVE_TOKENIZER, find_config, has_tokenizer, is_local_path, read_config
from prime_hpc.store.run_paths import list_steps, parse_step, step_name
from prime_hpc.store.weights import holds_changes, went_over_network

_TABLE = re.compile(r"embed_.*|.*embed(ding)?s?|w|wte|wpe|(lm_)?head|output_projection")
"""Last names of tables with a row a token or a position."""
_ROUTERS = {"gate", "router"}


def check(
    loaded: Loaded,
    role: str | None = None,
    *,
    by_slurm: bool = False,
    starts_elsewhere: bool = False,
    waits: bool = False,
    is_here: bool = False,
) -> None:
    """Raise a ConfigError with everything that would fail later, in the whole run or in one role of it.

    Args:
        role: the role alone; None: the whole run.
        by_slurm: it runs as a job, whose preflight asks for room too.
        starts_elsewhere: the job starts from another Python environment than this one (a container, a pack): one that
            is not installed here is for lint to warn of, and for the job's own check to refuse.
        waits: the job waits for another one (`slurm.dependency`), which may make the model or the data.
    """
    experiment = loaded.experiment
    problems = [
        *(_model(experiment, waits) if role != "orchestrator" else []),
        *(trained_models(experiment) if role in (None, "trainer") and experiment.trains else []),
        *(_environments(experiment, starts_elsewhere) if _samples(experiment, role) else []),
        *(
            Problem(str(error), key)
            for key, error in (unread_rows(experiment) if _samples(experiment, role) and not waits else ())
        ),
        *(_data(experiment, waits) if experiment.kind == "sft" else []),
        *reward_models(experiment, role),
        *_teacher(experiment),
        *_distillation(experiment),
        *(_judge(experiment) if not waits else ()),
        *_compression(experiment),
        *(engine_problems(experiment, role) if is_here else []),
        *storage_problems(experiment, role, by_slurm),
    ]
    if problems:
        once = {(p.key, p.message): p for p in problems}.values()  # trainer and engines load the same model
        raise ConfigError(Problem(p.message, p.key, loaded.provenance.get(p.key or "", p.origin)) for p in once)


def engine_problems(experiment: Experiment, role: str | None = None) -> Iterator[Problem]:
    """Yield what engines that start on this machine (`role`: of one group) would refuse once they run: a backend that
    is not installed, and keys that ask it for what it does not do."""
    for group in [group for group in engine_roles(experiment) if role in (None, group)]:
        view, section = served_by(experiment, group), SECTIONS[group]
        assert view.inference is not None
        backend = load_backend(view.inference.backend, f"{section}.backend")
        if python := view.inference.python:
            if problem := environment.problem_of(python, view.inference.backend):
                yield Problem(problem, f"{section}.python")
        elif missing := backend.missing():
            yield Problem(f"{backend.title}: {missing}", f"{section}.backend")
        device = planned_device(experiment.device).type
        for refusal in refusals_of(backend, view.model_copy(update={"device": device}), group):
            yield Problem(f"{refusal.reason}; {refusal.remedy}", refusal.key)


def _samples(experiment: Experiment, role: str | None) -> bool:
    """Return whether this run itself plays episodes: of a parent its runs do."""
    return experiment.samples and role in (None, "orchestrator") and not is_parent(experiment)


def _model(experiment: Experiment, waits: bool) -> list[Problem]:
    name = experiment.model.name
    folder = Path(name).expanduser()
    if not is_local_path(name) or (waits and not folder.exists()):
        return []
    is_loaded = experiment.trains or experiment.inference is not None
    if problems := _folder(name, "model.name", is_loaded=is_loaded):
        return problems
    wanted, stated = experiment.context, "sft.data.seq_len" if experiment.sft.data.seq_len else "seq_len"
    if experiment.samples:
        longest = experiment.seq_len if experiment.trains else 0  # without a trainer it only stands for the engines'
        wanted, stated = max(longest, experiment.max_model_len), "seq_len"
    return [*_context(folder, wanted, "model.name", stated), *adapter_problems(experiment)]


def trained_models(experiment: Experiment) -> list[Problem]:
    """Why the weights of a model that the trainer would load cannot be: broken off, quantised, of another format, not
    their config's."""
    problems = []
    for key, name in trained_names(experiment).items():
        config = find_config(name)
        if config is None:
            continue
        try:
            tensors = stored.stored_tensors(config.parent)
            whole = is_local_path(name)  # of a hub's more may be on their way
        except ValueError as error:  # of a hub's name they may not all be here yet: the config can be read all the same
            tensors, whole = {}, False
            if is_local_path(name):
                problems.append(Problem(str(error), key))
        wrong = [stored.quantised(config.parent, tensors), stored.other_vocabulary(config.parent, tensors)]
        wrong += [stored.other_format(config.parent), stored.without_head(config.parent, tensors)] if whole else []
        problems += [Problem(message, key) for message in wrong if message]
    return problems


def _folder(name: str, key: str, *, is_loaded: bool = True) -> list[Problem]:
    """List what a local model's directory lacks; whether its weights are whole, where this run loads them."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return [_not_there(name, key)]
    if not (folder / "config.json").exists() and holds_changes(folder):
        cure = f"prime-hpc export RUN --merged {parse_step(folder.name)} --output DIR makes a model of it"
        return [Problem(f"{name} holds only what changed since the version before it ({cure})", key)]
    if not (folder / "config.json").exists() and went_over_network(folder):
        return [Problem(f"{name} went to the engines over the network alone: take the version of a checkpoint", key)]
    if not (folder / "config.json").exists() and (folder / ADAPTER_CONFIG).exists():
        cure = "prime-hpc export RUN --merged STEP --output DIR makes a model of a run's"
        return [Problem(f"{name} holds an adapter alone, without the model that it is for ({cure})", key)]
    if not (folder / "config.json").exists():
        return [Problem(f"{name} holds no config.json: not a Hugging Face model directory", key)]
    if not any(p.suffix in WEIGHT_SUFFIXES for p in folder.iterdir()):
        return [Problem(f"{name} holds a config but no weights (*.safetensors)", key)]
    return _broken(folder, key) if is_loaded else []


def _not_there(name: str, key: str) -> Problem:
    """Say that a model's directory is missing; of a run's version also what of the run is there."""
    folder = Path(name).expanduser()
    if folder.parent.name != "weights" or parse_step(folder.name) is None:
        return Problem(f"{name!r} is not a directory (a hub name looks like owner/model)", key)
    run, versions = folder.parent.parent, list_steps(folder.parent)
    state = f"its newest is {step_name(versions[-1])}" if versions else "it has none yet"
    state = state if run.is_dir() else "there is no such run: train it first"
    return Problem(f"{name!r} is not a directory: a version of the run {run}, and {state}", key)


def _broken(folder: Path, key: str) -> list[Problem]:
    """Say that a directory's weights are not whole, from their headers."""
    try:
        problem = stored.without_head(folder, stored.stored_tensors(folder))
    except ValueError as error:
        problem = str(error)
    return [Problem(problem, key)] if problem else []


def _context(folder: Path, wanted: int, key: str, stated: str = "seq_len") -> list[Problem]:
    """Check that the model's own context length holds what the run asks of it; `key` names the model, `stated` what
    asks."""
    try:
        limit = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    except (ValueError, AttributeError):
        return [Problem(f"{folder / 'config.json'} is not a JSON object", key)]
    if isinstance(limit, int) and wanted > limit:
        whose = {"model.name": "the model's", MODELS["judge"]: "the judge's"}.get(key, "the teacher's")
        return [Problem(f"{wanted} tokens are beyond {whose} max_position_embeddings = {limit}", stated)]
    return []


def is_installed(identifier: str) -> bool:
    """Return whether an environment is there, as far as a login node can tell without importing it."""
    return (
        short_id(identifier) in BUNDLED or find_benchmark(identifier) is not None or _is_plugin(identifier, "tasksets")
    )


def _is_plugin(identifier: str, folder: str) -> bool:
    """Return whether verifiers ships a part of that name in a folder of its own, or a package of the name is there."""
    verifiers = importlib.util.find_spec("verifiers")
    if verifiers is None or verifiers.origin is None:
        return True  # a login node without the roles' packages: the job's own check will tell
    shipped = Path(verifiers.origin).parent / "v1" / folder
    module = taskset_module(identifier)
    if (shipped / module).exists() or (shipped / f"{module}.py").exists():
        return True
    # of a dotted path only the package: to look further would import it
    return importlib.util.find_spec(module.split(".")[0] or "-") is not None


def _teacher(experiment: Experiment) -> list[Problem]:
    """Check that the teacher means the same by token ids, which it scores and samples."""
    teacher = experiment.orchestrator.teacher
    if experiment.kind != "rl" or teacher is None or teacher.model is None:
        return []
    key = MODELS["teacher"]
    if is_local_path(teacher.model):
        folder = Path(teacher.model).expanduser()
        if not folder.is_dir():
            return [_not_there(teacher.model, key)]
        if experiment.teacher_inference is not None:
            longest = served_by(experiment, "teacher").max_model_len
            if lacks := _folder(teacher.model, key) or _context(folder, longest, key):
                return lacks
    if teacher.tokenizer == "own":
        if not is_local_path(teacher.model) or has_tokenizer(Path(teacher.model).expanduser()):
            return []
        return [Problem(f"{teacher.model} holds no tokenizer to read with (tokenizer = own): {SAVE_TOKENIZER}", key)]
    vocabularies: list[dict[str, int] | None] = []
    for name, its_key in ((experiment.model.name, "model.name"), (teacher.model, key)):
        try:
            vocabularies.append(read_vocabulary(name))
        except ValueError as error:
            return [Problem(str(error), its_key)]
    if None in vocabularies or vocabularies[0] == vocabularies[1]:
        return []
    own, other = (v or {} for v in vocabularies)
    differs = next(iter(sorted({t for t in own.keys() | other.keys() if own.get(t) != other.get(t)})))
    return [
        Problem(
            f"{teacher.model} has another tokenizer than {experiment.model.name}: {len(other)} tokens against "
            f"{len(own)}, and {differs!r} is {other.get(differs)} there, {own.get(differs)} here; a teacher needs the "
            "policy's vocabulary, or orchestrator.teacher.tokenizer = own (opd), with which it reads the text itself",
            key,
        )
    ]


def _distillation(experiment: Experiment) -> list[Problem]:
    """Check that there are as many tokens as a teacher is to name, whoever it is: asked for more, vLLM ends."""
    distillation = experiment.trainer.loss.distillation
    if distillation is None:
        return []
    try:
        known = read_vocabulary(experiment.model.name)
    except ValueError as error:
        return [Problem(str(error), "model.name")]
    if known is None or distillation.top_k <= len(known):
        return []
    text = f"{distillation.top_k} tokens of a vocabulary of {len(known)}: {len(known)} at most"
    return [Problem(text, "trainer.loss.distillation.top_k")]


def _judge(experiment: Experiment) -> list[Problem]:
    """Check that the judge's model is there, as far as a directory tells."""
    if "judge" not in engine_roles(experiment):
        return []
    key, view = MODELS["judge"], served_by(experiment, "judge")
    name, length = view.model.name, view.max_model_len
    if not is_local_path(name):
        return []
    return _folder(name, key) or _context(Path(name).expanduser(), length, key, "judge_inference.max_model_len")


def read_vocabulary(name: str) -> dict[str, int] | None:
    """Token -> id of a model on this machine (tokenizer.json); None where that cannot be seen.
    Raises ValueError: the file cannot be read, or is no JSON."""
    config = find_config(name)
    path = config.parent / "tokenizer.json" if config is not None else None
    if path is None or not path.is_file():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no tokenizer ({error}); did its download break off? Fetch it again") from error
    try:
        vocabulary = tree["model"]["vocab"]
        added = {token["content"]: token["id"] for token in tree.get("added_tokens", [])}
    except (AttributeError, LookupError, TypeError):
        return None
    return vocabulary | added if isinstance(vocabulary, dict) else None  # a list: of tokens with their scores


def stated_environments(experiment: Experiment) -> Iterator[tuple[str, EnvConfig]]:
    """Yield what the run trains on, holds out or plays, each with its key."""
    orchestrator = experiment.orchestrator
    held_out = orchestrator.eval.env if orchestrator.eval else []
    trained = orchestrator.env if experiment.kind == "rl" else []
    alone: list[StandaloneEnvConfig] = [] if experiment.trains else experiment.episodes.environments
    by_name = len(experiment.episodes.environment_ids)
    named: list[tuple[str, Sequence[EnvConfig]]] = [
        ("orchestrator.env", trained),
        ("orchestrator.eval.env", held_out),
        (f"{experiment.kind}.environment_ids", alone[:by_name]),
        (f"{experiment.kind}.env", alone[by_name:]),
    ]
    for key, envs in named:
        for index, env in enumerate(envs):
            yield f"{key}.{index}", env


def key_of_id(key: str) -> str:
    """Key of an environment's id; `key`: of the environment, from `stated_environments`."""
    return key if "environment_ids" in key else f"{key}.id"


def _environments(experiment: Experiment, starts_elsewhere: bool) -> list[Problem]:
    problems = []
    if experiment.kind == "rl" and not experiment.orchestrator.env:
        problems.append(Problem("no environment is named; add one, e.g. `- id: reverse-text`", "orchestrator.env"))
    if starts_elsewhere:
        return problems
    return [*problems, *missing_environments(experiment), *unknown_arguments(experiment)]


def starts_elsewhere(experiment: Experiment, site: SiteConfig) -> bool:
    """Return whether a Slurm job of this experiment starts from another Python environment than this one, or its script
    gives Python a path of its own."""
    if site.container is not None or (experiment.slurm.env_pack or site.env_pack) is not None:
        return True
    name = "PYTHONPATH"
    lines = [*site.setup, *experiment.slurm.setup]
    return name in {**site.env, **experiment.slurm.env} or any(name in line for line in lines)


def missing_environments(experiment: Experiment) -> list[Problem]:
    """Stated environments and harnesses that are not installed here, with the nearest name; imports none of them."""
    names = [*BUNDLED, *BENCHMARKS]
    problems = []
    for key, env in stated_environments(experiment):
        if not is_installed(env.id):
            near = get_close_matches(short_id(env.id), names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            problems.append(
                Problem(
                    f"taskset {env.id!r} is not installed; {hint}bundled are {', '.join(names)}; "
                    f"others are installed with pip and found as the module {taskset_module(env.id)!r}",
                    key_of_id(key),
                )
            )
        if env.harness is not None and env.harness != IN_PROCESS and not _is_plugin(env.harness, "harnesses"):
            words = f"harness {env.harness!r} is not installed: {IN_PROCESS}, or the module of one"
            problems.append(Problem(words, f"{key}.harness"))
    return problems


def unknown_arguments(experiment: Experiment) -> Iterator[Problem]:
    """Yield arguments that environments do not have, with the nearest name, and those of `rows` with which it would not
    begin."""
    for key, env in stated_environments(experiment):
        for name, message in wrong_rows_arguments(env) if short_id(env.id) in READERS else ():
            yield Problem(f"{env.id}: {message}", f"{key}.args.{name}")
        of_env = None if "id" in env.env_args else env_argument_names(env.id)
        for where, given, known in (("args", env.args, argument_names(env.id)), ("env_args", env.env_args, of_env)):
            for name in given:
                if known is not None and name not in known:
                    near = get_close_matches(name, known, n=1)
                    hint = f"did you mean {near[0]}? " if near else ""
                    has = f"it has {', '.join(known) or 'none'}"
                    yield Problem(f"{env.id} has no such argument; {hint}{has}", f"{key}.{where}.{name}")


def unread_rows(experiment: Experiment) -> Iterator[tuple[str, ValueError]]:
    """Yield what is wrong with the files that `rows` and `prompts` are given, rows and reward functions, by their keys:
    `NothingThereError`, or files that begin as no file of rows does (one JSON array, a table)."""
    own = f"synthesize.env.{len(experiment.episodes.env)}"  # the environment of `synthesize.prompts`
    for key, env in stated_environments(experiment):
        for name, path in named_files(env.id, env.args):
            where = "synthesize.prompts" if key == own else f"{key}.args.{name}"
            try:
                if name == "files":
                    first_columns(find_data(source := SFTSourceConfig(path=[path])), source)
                elif not Path(path).is_file():
                    yield where, NothingThereError(f"{path} is no file")
            except ValueError as error:
                yield where, error


def _data(experiment: Experiment, waits: bool) -> list[Problem]:
    """List what is wrong with the files of training and held-out rows."""
    sft, facts = experiment.sft, read_model(experiment.model.name)
    vocab, sees = facts.vocab_size if facts is not None else None, experiment.model.vision is not None
    problems = []
    for key, source in sft.sources.items():
        try:
            columns = first_columns(found := find_data(source), source)
            if columns is not None and not has_columns(columns, source):
                problems.append(Problem(f"{found.files[0]}: {missing_columns(columns, source)}", f"{key}.columns"))
                continue
            if not waits and (said := wrong_row(found, source, sft.data, vocab_size=vocab, sees_images=sees)):
                problems.append(Problem(f"{said}; {SKIP_ROWS}", f"{key}.path"))
        except ValueError as error:
            if not (waits and isinstance(error, NothingThereError)):
                problems.append(Problem(str(error), f"{key}.path"))
    template = sft.data.template_file
    if template is not None and not template.is_file():
        problems.append(Problem(f"{template} does not exist (auto, none, or a file)", "sft.data.chat_template"))
    return problems


def _compression(experiment: Experiment) -> list[Problem]:
    if experiment.kind != "rl" or not experiment.orchestrator.compress_rollouts or zstd.is_there():
        return []
    return [Problem("needs pyarrow: pip install 'prime-hpc[export]'", "orchestrator.compress_rollouts")]


def linear_modules(shapes: Mapping[str, tuple[int, ...]], model_type: str = "") -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of the modules that an adapter may be put on: matrices outside tables of tokens and positions,
    routers and experts (which the trainer holds stacked).

    Args:
        shapes: of a model's stored tensors.
        model_type: its family, some of which call modules otherwise than their checkpoints do.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module == name or len(shape) != 2 or ".experts." in name:
            continue
        parent, _, last = module.rpartition(".")
        if _TABLE.fullmatch(last) or _ROUTERS & {last, parent.rpartition(".")[2]}:
            continue
        for own in STORED_AS.get(model_type, {}).get(last, (last,)):
            found[f"{parent}.{own}"] = (shape[0], shape[1])
    return found


def _kind(experiment: Experiment) -> str:
    return str((read_config(experiment.model.name) or {}).get("model_type") or "")


def left_whole(experiment: Experiment) -> list[str]:
    """Last names of the projections that the usual targets of `model.lora` miss in this model, of which they match
    others; [] where the targets are stated, or the weights are not here to be looked at."""
    lora, config = experiment.model.lora, find_config(experiment.model.name)
    if lora is None or config is None or lora.target_modules != list(DEFAULT_TARGETS):
        return []
    modules = linear_modules(stored_shapes(config.parent) or {}, _kind(experiment))
    missed = [name for name in modules if not any(matches(target, name) for target in lora.target_modules)]
    last = last_names(name for name in missed if "visi" not in name and "visual" not in name)
    return [name for name in last if not name.endswith(("gate", "router")) and "embed" not in name]


def adapter_problems(experiment: Experiment) -> list[Problem]:
    """Targets that match nothing, and a rank that exceeds a target's dimensions; [] where there are no adapters, or the
    weights are not here to be looked at. Reads their headers alone."""
    lora, config = experiment.model.lora, find_config(experiment.model.name)
    shapes = stored_shapes(config.parent) if lora is not None and config is not None else None
    if lora is None or shapes is None:
        return []
    modules = linear_modules(shapes, _kind(experiment))
    heads = [name for name in HEADS if f"{name}.weight" in shapes] or [HEADS[0]]  # stored only where it is not tied
    try:
        chosen = select_modules(lora, [*modules, *heads])
    except ValueError as error:
        return [Problem(str(error).removeprefix("model.lora.target_modules: "), "model.lora.target_modules")]
    parts = {own for names in STORED_AS.get(_kind(experiment), {}).values() if len(names) > 1 for own in names}
    if within := [name for name in chosen if name.rpartition(".")[2] in parts]:
        message = f"the checkpoint holds {within[0]} within a larger matrix, where an adapter has no name"
        good = ", ".join(name for name in last_names(modules) if name not in parts) or "none beside them"
        return [Problem(f"{message}; there are {good}", "model.lora.target_modules")]
    narrow = min(chosen, key=lambda name: min(modules[name]))
    if lora.rank > min(modules[narrow]):
        shape = " x ".join(map(str, modules[narrow]))
        return [Problem(f"{lora.rank} exceeds {narrow}, which is {shape}: lower it", "model.lora.rank")]
    return []
