"""How a step of the job runs in the site's container: the arguments of srun, the command, what is mounted.

The supervisor runs outside. Three kinds of site: pyxis (`srun --container-image`), environment definition files (`srun
--environment`), and apptainer, which srun starts as a program. Every path that the experiment states is the same inside
and outside.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.absolute import local_directory
from prime_hpc.config.env_files import named_files
from prime_hpc.config.sections.slurm import ContainerConfig, SiteConfig

ENVIRONMENT_FILE = "container.toml"
"""In the run directory: the site's environment definition with the run's mounts."""
_CACHES = {"HF_HOME": "~/.cache/huggingface", "HF_HUB_CACHE": "", "HF_DATASETS_CACHE": "", "TORCH_HOME": ""}
"""Folders of downloaded models and data sets: variable -> default."""
_APPTAINER = """\
if [ -e /dev/nvidiactl ] || [ -e /dev/nvidia0 ]; then set -- --nv "$@"
elif [ -e /dev/kfd ]; then set -- --rocm "$@"; fi
if [ -n "${TMPDIR:-}" ] && [ -d "$TMPDIR" ]; then set -- --bind "$TMPDIR" "$@"; fi
box=apptainer
if ! command -v apptainer >/dev/null 2>&1 && command -v singularity >/dev/null 2>&1; then box=singularity; fi
exec "$box" exec "$@"
"""
"""On the node: which GPUs it has, whether it has the job's TMPDIR, and under which of its two names the program is
installed (singularity takes the same options), is not known before."""


@dataclass(frozen=True)
class Container:
    """The container of one run's steps."""

    config: ContainerConfig
    run_dir: Path
    mounts: tuple[str, ...]
    """`host:container` pairs."""
    name: str | None = None
    """Under which a node keeps it for the steps that follow (pyxis); None: it is made anew."""

    def srun_args(self) -> list[str]:
        """More arguments of srun."""
        if self.config.runtime == "pyxis":
            named = [f"--container-name={self.name}"] if self.name else []
            mounts = f"--container-mounts={','.join(self.mounts)}"
            own = [f"--container-image={self.config.image}", *named, mounts, f"--container-workdir={self.run_dir}"]
            return [*own, *self.config.args]
        if self.config.runtime == "edf":
            return [f"--environment={self.run_dir / ENVIRONMENT_FILE}", *self.config.args]
        return []

    def command(self) -> list[str]:
        """Build the command that srun starts, up to the arguments of Python."""
        if self.config.runtime != "apptainer":
            return [self.config.python]
        binds = [token for mount in self.mounts for token in ("--bind", mount)]
        own = [*binds, "--pwd", str(self.run_dir), *self.config.args, self.config.image, self.config.python]
        return ["sh", "-c", _APPTAINER, "apptainer", *own]


def container_of(
    experiment: Experiment, site: SiteConfig, run_dir: Path, job_id: str, environ: Mapping[str, str]
) -> Container | None:
    """Return the container of a run's steps, as this node sees what is to be mounted; None where the site has none.
    Raises ConfigError: its environment definition cannot be written into the run directory."""
    if site.container is None:
        return None
    paths = [_there(path) for path in stated_paths(experiment, site, run_dir).values()] + _caches(environ)
    mounts = tuple(all_mounts(site.container, [run_dir, *(path for path in paths if path != Path("/"))]))
    if site.container.runtime == "edf":
        try:
            (run_dir / ENVIRONMENT_FILE).write_text(_environment(site.container, run_dir, mounts), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{run_dir / ENVIRONMENT_FILE}: {error.strerror}", "output_dir") from error
    return Container(site.container, run_dir, mounts, f"prime-hpc-{job_id}")


def stated_paths(experiment: Experiment, site: SiteConfig, run_dir: Path) -> dict[str, Path]:
    """Key -> the directory or file that it states and the roles need, where it is a path at all."""
    found = {"output_dir": run_dir}
    if experiment.ckpt is not None:
        ckpt = experiment.ckpt
        named = {"path": ckpt.path, "staging_dir": ckpt.staging_dir, "resume_step": ckpt.resume_step}
        found |= {f"ckpt.{name}": value for name, value in named.items() if isinstance(value, Path)}
    teacher, kl, critic = experiment.orchestrator.teacher, experiment.trainer.loss.kl, experiment.trainer.critic
    models = {"model.name": experiment.model.name, "trainer.loss.kl.model": kl.model if kl else None}
    models["trainer.critic.name"] = critic.name if critic else None
    models["orchestrator.teacher.model"] = teacher.model if teacher else None
    models["judge_inference.model"] = experiment.judge_inference.model if experiment.judge_inference else None
    for key, name in models.items():
        if name and (path := local_directory(name)) is not None:
            found[key] = path
    for number, text in enumerate(experiment.synthesize.prompts if experiment.kind == "synthesize" else []):
        found[f"synthesize.prompts.{number}"] = _of_rows(experiment, text)
    stated = [(f"{key}.{n}", env) for key, envs in experiment.environment_lists.items() for n, env in enumerate(envs)]
    for key, env in stated:
        for number, (argument, text) in enumerate(named_files(env.id, env.args)):
            path = Path(text).parent if argument == "reward" else _of_rows(experiment, text)
            found[f"{key}.args.{argument}.{number}"] = path
    if experiment.kind == "eval" and experiment.eval.weights_dir is not None:
        found["eval.weights_dir"] = experiment.eval.weights_dir
    if experiment.kind == "sft":
        for key, source in experiment.sft.sources.items():
            for number, text in enumerate(source.paths):
                found[f"{key}.path.{number}"] = _of_rows(experiment, text)
        data = experiment.sft.data
        for name, path in (("cache_dir", data.cache_dir), ("chat_template", data.template_file)):
            if path is not None:
                found[f"sft.data.{name}"] = path
    if site.node_local and (fixed := fixed_part(site.node_local)):
        found["site.node_local"] = Path(fixed)
    return found


def _of_rows(experiment: Experiment, text: str) -> Path:
    """Return what a path of rows needs: with images, which lie beside it, the folder of a file."""
    path = _fixed(Path(text))
    return path.parent if experiment.model.vision is not None and path.is_file() else path


def _caches(environ: Mapping[str, str]) -> list[Path]:
    texts = [environ.get(name) or default for name, default in _CACHES.items()]
    return [path for text in texts if text and (path := Path(text).expanduser()).is_dir()]


def _there(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists: what does not exist cannot be mounted, and
    would be made inside the container, where it would be lost."""
    return next(found for found in (path, *path.parents) if found.exists())


def all_mounts(config: ContainerConfig, paths: Iterable[Path]) -> list[str]:
    """Return the site's mounts, and each path that none of them, and none before it, shows at its own place."""
    mounts = list(config.mounts)
    seen = [Path(outside) for outside, inside in map(split_mount, mounts) if outside == inside]
    own = {Path("/tmp")} if config.runtime == "apptainer" else set()  # mounted by itself
    for path in sorted(set(paths) - own, key=lambda path: (len(path.parts), str(path))):
        if not any(path.is_relative_to(root) for root in seen):
            mounts.append(f"{path}:{path}")
            seen.append(path)
    return mounts


def split_mount(mount: str) -> tuple[str, str]:
    """Outside and inside of `host:container[:flags]`; `host` alone is mounted at its own place."""
    outside, _, rest = mount.partition(":")
    return outside.rstrip("/"), (rest.partition(":")[0] or outside).rstrip("/")


def fixed_part(path: str) -> str:
    """`/scratch/$USER/x` -> `/scratch`; `$TMPDIR` -> ``."""
    fixed = path.split("$")[0]
    if "$" in path:
        fixed = fixed.rpartition("/")[0]
    return fixed.rstrip("/")


def _fixed(path: Path) -> Path:
    """Of a pattern the directory that all its files are below."""
    parts = path.parts
    wild = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    return path if wild is None else Path(*parts[:wild])


def _environment(config: ContainerConfig, run_dir: Path, mounts: Iterable[str]) -> str:
    """Write an environment definition upon the site's: lists of mounts are added to those that it has."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("Made by the run that lies here; the site's profile names the base."))
    document["base_environment"] = [config.image]
    document["mounts"] = list(mounts)
    document["workdir"] = str(run_dir)
    return tomlkit.dumps(document)


def one_node_srun(srun_args: Iterable[str], unset: Iterable[str]) -> str:
    """Shell words that start what follows as a step of a one-node job, as `StepContext.srun` would."""
    forget = [word for name in unset for word in ("-u", name)]
    own = ["--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--kill-on-bad-exit=0", "--export=ALL"]
    return shlex.join(["env", *forget, "srun", *own, "--unbuffered", "--input=none", *srun_args])
