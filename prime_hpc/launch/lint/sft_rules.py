"""Lint's rules of supervised fine-tuning: files, epochs, learning rate."""

from collections.abc import Iterator

from prime_hpc.config.sections.trainer import OptimConfig
from prime_hpc.launch.estimate.epochs import epochs_line
from prime_hpc.launch.first_rows import SKIP_ROWS, nothing_trained, unusual_role, wrong_row
from prime_hpc.launch.lint.lint_finding import Finding, Subject, rule
from prime_hpc.store.dataset.files import NothingThereError, find_data, first_columns, has_columns, missing_columns
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
                yield Finding("PH207", "warning", key, str(error), remedy)
            else:
                yield Finding("PH207", "error", key, str(error), "")
            continue
        try:
            columns = first_columns(found, source)
            lacks = columns is not None and not has_columns(columns, source)
            wrong = None if lacks else wrong_row(found, source, sft.data, vocab_size=vocab, sees_images=sees_images)
            unusual = None if lacks or wrong else unusual_role(found, source, sft.data)
            idle = None if lacks or wrong or unusual else nothing_trained(found, source, sft.data)
        except ValueError as error:
            yield Finding("PH207", "error", key, str(error), "")
            continue
        if columns is not None and lacks:
            said, to_do = missing_columns(columns, source).split(". ", 1)
            yield Finding("PH207", "error", key, f"{found.files[0]}: {said}", to_do)
        elif wrong is not None:
            yield Finding("PH207", "error", key, wrong, SKIP_ROWS)
        elif unusual is not None:
            yield Finding(
                "PH207",
                "warning",
                key,
                unusual,
                "a typing error? Few chat templates know others than " + ", ".join(COMMON_ROLES),
            )
        elif idle is not None:
            yield Finding("PH207", "warning", key, idle, "see sft.data.loss_roles, or the masks of rows of tokens")
    template = sft.data.template_file
    if template is not None and not template.is_file():
        key = "sft.data.chat_template"
        yield Finding("PH207", "warning", key, f"{template} does not exist (yet)", "make it; or auto, or none")


@rule("sft")
def epochs(subject: Subject) -> Iterator[Finding]:
    """Say how many steps the epochs are."""
    if subject.experiment.num_steps is None:
        yield Finding("PH214", "info", "sft.data.num_epochs", f"steps: {epochs_line(subject.experiment)}", "")


@rule("sft")
def rate(subject: Subject) -> Iterator[Finding]:
    """Warn of a learning rate that nobody chose: the default is that of reinforcement learning."""
    default, lr = OptimConfig().lr, subject.experiment.trainer.optim.lr
    if lr != default or subject.experiment.sft.data.type == "fake":
        return
    usual = "1e-4" if subject.experiment.model.lora is not None else "1e-5 to 2e-5"
    yield Finding(
        "PH224",
        "warning",
        "trainer.optim.lr",
        f"{lr:g}, the default, is a rate for reinforcement learning: supervised fine-tuning learns next to nothing",
        f"usual: {usual}",
    )
