"""The objects of a run as text: one YAML stream for kubectl, or a Helm chart."""

import re
from pathlib import Path
from typing import Any

import yaml

from prime_hpc import __version__
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.experiment import Experiment
from prime_hpc.kubernetes.manifests import Manifest, Values, manifests
from prime_hpc.kubernetes.placement import components_of, for_pods, object_name, section_of

_MARK = re.compile(r"""["']?@@([^@]+)@@["']?""")


_IN_VALUES = {
    "image": "image",
    "image_pull_secrets": "imagePullSecrets",
    "node_selector": "nodeSelector",
    "tolerations": "tolerations",
    "security_context": "securityContext",
    "container_security_context": "containerSecurityContext",
    "env_from": "envFrom",
    "storage": "storage",
    "storage_class": "storageClassName",
    "shared_memory": "sharedMemory",
}
"""Field of `Values` -> its name in the chart's values.yaml."""


def yaml_stream(objects: list[Manifest]) -> str:
    """Return the objects for `kubectl apply -f -`."""
    return "".join(f"---\n{_dump(manifest)}" for manifest in objects)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are; no line is folded, so that marks stay whole."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _dump(data: Any) -> str:
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=1_000_000, allow_unicode=True))


def write_chart(experiment: Experiment, folder: Path) -> list[Path]:
    """Write a Helm chart of the experiment: the objects of `manifests`, the cluster's part of them as values.
    `folder`: new, or an earlier chart's.
    Raises ConfigError: the experiment cannot run as pods, or the folder is no chart's or cannot be written."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "Chart.yaml").is_file():
        raise ConfigError(f"{folder} holds something else than a chart; name a new folder", "--chart")
    section, components = section_of(experiment), components_of(for_pods(experiment))
    stated = Values.of(section, components, "")
    values = {name: getattr(stated, field) for field, name in _IN_VALUES.items()}
    values["resources"] = dict(stated.resources)
    references = Values(
        **{field: _mark(f".Values.{name}") for field, name in _IN_VALUES.items()},
        key=_mark("randAlphaNum 40"),
        resources={name: _mark(f".Values.resources.{name}") for name in stated.resources},
    )
    about = {
        "apiVersion": "v2",
        "name": object_name(experiment),
        "description": f"prime-hpc: the experiment {experiment.name}",
        "type": "application",
        "version": "0.1.0",
        "appVersion": __version__,
    }
    files = {"Chart.yaml": _dump(about), "values.yaml": _dump(values)}
    for manifest in manifests(experiment, references):
        name = f"{manifest['kind'].lower()}-{manifest['metadata']['labels']['app.kubernetes.io/component']}.yaml"
        files[f"templates/{name}"] = _template(manifest)
    try:
        (folder / "templates").mkdir(parents=True, exist_ok=True)
        for old in (folder / "templates").glob("*.yaml"):
            old.unlink()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}", "--chart") from error
    return [folder / name for name in files]


def _mark(expression: str) -> str:
    """Return what stands in a template until the chart's expression takes its place."""
    return f"@@{expression} | toJson@@"


def _template(manifest: Manifest) -> str:
    """Return a template: braces of the experiment's own escaped, marks replaced by the chart's expressions."""
    text = _dump(manifest).replace("{{", '{{ "{{" }}')
    return _MARK.sub(lambda match: "{{ " + match[1] + " }}", text)
