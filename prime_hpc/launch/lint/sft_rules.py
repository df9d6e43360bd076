"""Lint's rules of supervised fine-tuning: files, epochs, learning rate."""

from collections.abc import Iterator

from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.config.sections.trainer import OptimConfig
from prime_hpc.launch.estimate.epochs import epochs_line
from prime_hpc.launch.fetch.hub import Shape, ask, shape_of, shape_of_prepared
from prime_hpc.launch.fetch.needs import Need
from prime_hpc.launch.fetch.presence import look
from prime_hpc.launch.first_rows import SKIP_ROWS, nothing_trained, unusual_role, wrong_row
from prime_hpc.launch.lint.lint_finding import Finding, Severity, Subject, rule
from prime_hpc.store.dataset.files import (
    DataFiles,
    NothingThereError,
    find_data,
    first_columns,
    has_columns,
    missing_columns,
    saved_splits,
)
from prime_hpc.trainer.data.messages import COMMON_ROLES


@rule("sft")
def data(subject: Subject) -> Iterator[Finding]:
    """Check the files of supervised data."""
    sft, sees_images = subject.experiment.sft, subject.experiment.model.vision is not None
    vocab = subject.facts.vocab_size if subject.facts is not None else None
    for section, source in sft.sources.items():
        key = f"{section}.path"
        if not (source.paths or source.name):
            continue
        try:
            found = find_data(source)
        except ValueError as error:
            waits = subject.is_slurm and subject.experiment.slurm.waits
            remedy = "the job that this one waits for has to make it" if waits else "make it before submit"
            if isinstance(error, NothingThereError):
                yield Finding.warning("PH207", key, str(error), remedy)
            else:
                yield Finding.error("PH207", key, str(error), "")
            continue
        if found.kind == "hub":
            yield from _of_datasets(subject, section, source, found)
            continue
        try:
            columns = first_columns(found, source)
            lacks = columns is not None and not has_columns(columns, source)
            wrong = None if lacks else wrong_row(found, source, sft.data, vocab_size=vocab, sees_images=sees_images)
            unusual = None if lacks or wrong else unusual_role(found, source, sft.data)
            idle = None if lacks or wrong or unusual else nothing_trained(found, source, sft.data)
        except ValueError as error:
            yield Finding.error("PH207", key, str(error), "")
            continue
        if columns is not None and lacks:
            said, to_do = missing_columns(columns, source).split(". ", 1)
            yield Finding.error("PH207", key, f"{found.files[0]}: {said}", to_do)
        elif wrong is not None:
            yield Finding.error("PH207", key, wrong, SKIP_ROWS)
        elif unusual is not None:
            yield Finding.warning(
                "PH207", key, unusual, "a typing error? Few chat templates know others than " + ", ".join(COMMON_ROLES)
            )
        elif idle is not None:
            yield Finding.warning("PH207", key, idle, "see sft.data.loss_roles, or the masks of rows of tokens")
    template = sft.data.template_file
    if template is not None and not template.is_file():
        key = "sft.data.chat_template"
        yield Finding.warning("PH207", key, f"{template} does not exist (yet)", "make it; or auto, or none")


def _of_datasets(subject: Subject, section: str, source: SFTSourceConfig, found: DataFiles) -> Iterator[Finding]:
    """Check splits and columns of what `datasets` has saved, or prepared in its cache, or the hub's card tells of.

    What is the hub's may be another version by the time that the job runs: a warning.
    """
    severity: Severity = "error" if found.files else "warning"
    key = f"{section}.path" if found.files else f"{section}.name"
    for label, shape in _shapes(subject, source, found):
        wanted = {part.strip().partition("[")[0] for part in source.split.split("+")} - {"all"}
        if shape.splits is not None and not wanted <= set(shape.splits):
            message = f"{label} has the splits {', '.join(shape.splits)}, not {source.split}"
            yield Finding("PH207", severity, key, message, f"{section}.split")
        elif shape.columns is not None and not has_columns(shape.columns, source):
            said, to_do = missing_columns(shape.columns, source).split(". ", 1)
            yield Finding("PH207", severity, key, f"{label}: {said}", to_do)


def _shapes(subject: Subject, source: SFTSourceConfig, found: DataFiles) -> Iterator[tuple[str, Shape]]:
    for folder in found.files:
        splits = saved_splits(folder)
        shape = shape_of_prepared(folder if splits is None else folder / source.split)
        yield str(folder), Shape(splits, shape.columns)
    if source.name is None:
        return
    there = look(Need("dataset", "", source.name, source.subset, source.split), subject.environ)
    if there.is_there and there.path is not None:
        configuration = there.path.parents[1]  # one of several may be another one than the job's
        if source.subset or configuration.name == "default" or len(list(configuration.parent.iterdir())) == 1:
            yield source.name, shape_of_prepared(there.path)
    elif subject.asks_hub and (word := ask("dataset", source.name, subject.environ)) is not None:
        yield source.name, shape_of(word.card, source.subset)


@rule("sft")
def epochs(subject: Subject) -> Iterator[Finding]:
    """Say how many steps the epochs are."""
    if subject.experiment.num_steps is None:
        yield Finding.info("PH214", "sft.data.num_epochs", f"steps: {epochs_line(subject.experiment)}", "")


@rule("sft")
def rate(subject: Subject) -> Iterator[Finding]:
    """Warn of a learning rate that nobody chose: the default is that of reinforcement learning."""
    default, lr = OptimConfig().lr, subject.experiment.trainer.optim.lr
    if lr != default or subject.experiment.sft.data.type == "fake":
        return
    preference = subject.experiment.sft.preference
    if preference is not None and not preference.scores:
        return  # the default is a rate for pairs as well
    usual = "1e-4" if subject.experiment.model.lora is not None else "1e-5 to 2e-5"
    yield Finding.warning(
        "PH224",
        "trainer.optim.lr",
        f"{lr:g}, the default, is a rate for reinforcement learning: supervised fine-tuning learns next to nothing",
        f"usual: {usual}",
    )
