"""Lint of images: does the model see them, and does what the run asks for take them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import trained_names
from prime_hpc.config.env_files import named_files, short_id
from prime_hpc.config.families import vision_problem
from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.envs.rows.reading import as_messages, prompt_column
from prime_hpc.launch.checks import key_of_id, stated_environments
from prime_hpc.launch.lint.lint_finding import EVERY, TRAINING, Finding, Subject, rule
from prime_hpc.store.dataset.files import find_data, first_row
from prime_hpc.store.dataset.row_images import IMAGE_HERE, image_parts, other_media
from prime_hpc.store.model.config import find_config, is_local_path, read_config

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


@rule(*TRAINING)
def model(subject: Subject) -> Iterator[Finding]:
    """Models that see images without the key, the key with models that see none, and no image processor."""
    vision = subject.experiment.model.vision
    for key, name in trained_names(subject.experiment).items():
        config, path = read_config(name), find_config(name)
        if config is None or path is None:
            continue
        if problem := vision_problem(config, vision):
            yield Finding.error("PH129", key, f"{name}: {problem}", "")
        elif vision is not None and is_local_path(name) and not any((path.parent / p).is_file() for p in _PROCESSORS):
            message = f"{name} holds no image processor ({_PROCESSORS[0]})"
            yield Finding.error("PH129", key, message, "copy it from the model that this one was made of")


@rule(*TRAINING)
def layout(subject: Subject) -> Iterator[Finding]:
    """Report what takes text alone."""
    experiment = subject.experiment
    if experiment.model.vision is None:
        return
    parallel = experiment.trainer.parallel
    for key, width in (("cp", parallel.cp), ("tp", parallel.tp)):
        if width > 1:
            message = "images are not split over ranks (model.vision)"
            remedy = "set it to 1: FSDP shards the model, and what sees images, all the same"
            yield Finding.error("PH129", f"trainer.parallel.{key}", message, remedy)
    if is_parent(experiment):
        message = "runs of a trainer of many hold text alone (model.vision)"
        yield Finding.error("PH129", "trainer.max_concurrent_runs", message, "one run a trainer")
    if subject.is_rl and experiment.orchestrator.advantage.distils:
        message = "the teacher is asked with tokens alone, without the images among them (model.vision)"
        yield Finding.error("PH129", "orchestrator.advantage.type", message, "an algorithm without a teacher")


@rule("sft")
def data(subject: Subject) -> Iterator[Finding]:
    """Supervised rows with images for a run of text, as far as the first of them tells."""
    experiment = subject.experiment
    if experiment.model.vision is not None:
        return
    for key, source in experiment.sft.sources.items():
        if source.paths and _shows_images(source):
            message = (
                "rows hold images, and the run trains on text alone: a part that is an image is refused, a column of "
                "images is not read"
            )
            remedy = "model.vision: frozen, with a model that sees images"
            yield Finding.warning("PH129", f"{key}.path", message, remedy)


@rule(*EVERY)
def prompts(subject: Subject) -> Iterator[Finding]:
    """Report `shapes`, and rows of `rows` and `prompts`, that show what the model does not see, as far as the first
    row of each file tells."""
    for key, env in stated_environments(subject.experiment):
        if short_id(env.id) == "shapes" and _reads_text_alone(subject):
            message = f"{env.id} shows images, and the model reads text alone: its episodes would fail"
            yield Finding.error("PH129", key_of_id(key), message, "model.vision: frozen, with a model that sees images")
        columns = {name: value for name, value in env.args.items() if isinstance(value, str)}
        for name, path in named_files(env.id, env.args):
            row: dict[str, Any] = {}
            prompt: Any = None
            with contextlib.suppress(ValueError):  # told by the rules of files, or by the run that plays them
                source = SFTSourceConfig(path=[path])
                row = (first_row(find_data(source), source) or {}) if name == "files" else {}
                prompt = as_messages(row.get(columns.get("prompt") or prompt_column(row) or ""))
            turns = prompt if isinstance(prompt, list) else [{"content": prompt}]
            messages = [message for message in turns if isinstance(message, dict)]
            if other := other_media(messages, row):
                yield Finding.error("PH129", f"{key}.args.files", f"{path}: {other}", "leave such rows out")
            elif _reads_text_alone(subject) and (any(image_parts(messages)) or _has_marks(messages, row, columns)):
                message = f"{path}: rows hold images, and the model reads text alone: their episodes would fail"
                remedy = "model.vision: frozen, with a model that sees images"
                yield Finding.error("PH129", f"{key}.args.files", message, remedy)


def _has_marks(messages: Sequence[dict[str, Any]], row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Return whether a text has a place for an image, and a column of the row brings one."""
    is_marked = any(isinstance(text := message.get("content"), str) and IMAGE_HERE in text for message in messages)
    return is_marked and any(row.get(name) for name in (columns.get("images"), "images", "image") if name)


def _reads_text_alone(subject: Subject) -> bool:
    """Return whether those who play episodes here are known to be asked with text alone: an API gets images as they
    are."""
    experiment = subject.experiment
    return experiment.model.vision is None and (subject.is_rl or experiment.episodes.client is None)


def _shows_images(source: SFTSourceConfig) -> bool:
    try:
        row = first_row(find_data(source), source) or {}
    except ValueError:
        return False  # told by the rules of files
    turns = row.get(source.columns.get("messages", "messages")) or row.get(source.columns.get("prompt", "prompt"))
    messages = [message for message in turns if isinstance(message, dict)] if isinstance(turns, list) else []
    return any(image_parts(messages)) or bool(row.get(source.columns.get("images", "images")))
