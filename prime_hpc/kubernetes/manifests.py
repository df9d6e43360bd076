"""The Kubernetes objects of a run, as plain data: what `render --target kubernetes` prints and a Helm chart is made of.

    Secret                  the run's key, made anew at each rendering
    ConfigMap               the experiment
    Service (headless)      names for the pods, ready or not
    PersistentVolumeClaim   ReadWriteMany, unless `kubernetes.claim` names one; kept when the rest is deleted
    Job NAME-supervisor     supervisor and orchestrator
    Job NAME-trainer, ...   Indexed: a pod a node, each waiting for what the supervisor has it start

Jobs, not StatefulSets: an Indexed Job gives the same stable names and is over with the run, so that GPUs are given
back; a StatefulSet starts its pods again for ever.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.experiment import Experiment
from prime_hpc.config.sections.supervisor import KubernetesConfig
from prime_hpc.config.snapshot import stated_text
from prime_hpc.kubernetes.connection import ADDRESS, KEY_FILE, PORT
from prime_hpc.kubernetes.placement import (
    PODS,
    SUPERVISOR,
    Component,
    components_of,
    describe_pods,
    for_pods,
    object_name,
    section_of,
)
from prime_hpc.runtime.role_context import NODE
from prime_hpc.store.messaging.auth import new_secret

Manifest = dict[str, Any]
ABOUT = "/etc/prime-hpc"
"""Directory of the experiment in the supervisor's pod."""
KEY_DIR = "/etc/prime-hpc-key"
INDEX = "JOB_COMPLETION_INDEX"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
MANY = 1_000_000
"""Of pods that failed: Kubernetes is to make new ones for as long as the supervisor wants; it counts crashes itself."""
FINAL_CODES = [1, 2, 3, 66, 130]
"""Exit codes of the supervisor after which another attempt would change nothing; 75, 74 and signals come back."""


@dataclass(frozen=True)
class Values:
    """Facts that the cluster decides, not the experiment. In a chart these are references to its values."""

    image: Any
    image_pull_secrets: Any
    node_selector: Any
    tolerations: Any
    security_context: Any
    container_security_context: Any
    env_from: Any
    key: Any
    storage: Any
    storage_class: Any
    shared_memory: Any
    resources: Mapping[str, Any] = field(default_factory=dict)
    """By component."""

    @classmethod
    def of(cls, section: KubernetesConfig, components: list[Component], key: str) -> "Values":
        """Return what the experiment states."""
        resources: dict[str, Any] = {SUPERVISOR: _asked(section.supervisor_requests)}
        for component in components:
            if component.name == SUPERVISOR:
                continue
            gpus = {section.gpu_resource: str(component.gpus)} if component.gpus else {}
            resources[component.name] = _asked({**section.requests, **gpus})
        return cls(
            image=section.image,
            image_pull_secrets=[{"name": name} for name in section.image_pull_secrets],
            node_selector=section.node_selector,
            tolerations=section.tolerations,
            security_context=section.security_context,
            container_security_context=section.container_security_context,
            env_from=[{"secretRef": {"name": name}} for name in section.env_from],
            key=key,
            storage=section.storage,
            storage_class=section.storage_class,
            shared_memory=section.shared_memory,
            resources=resources,
        )


def _asked(requests: Mapping[str, str]) -> Manifest:
    """Return a container's resources: devices and huge pages cannot be shared out, so Kubernetes wants limits too."""
    whole = {name: size for name, size in requests.items() if "/" in name or name.startswith("hugepages-")}
    return {kind: dict(what) for kind, what in {"requests": requests, "limits": whole}.items() if what}


def manifests(experiment: Experiment, values: Values | None = None) -> list[Manifest]:
    """Return the objects of a run. `values`: default: what the experiment states, with a new key.
    Raises ConfigError: the experiment cannot run as pods, or states a secret, which a ConfigMap would show to many."""
    section = section_of(experiment)
    _refuse_secrets(experiment)
    own = for_pods(experiment)
    name, components = object_name(own), components_of(own)
    values = values or Values.of(section, components, new_secret())
    make = _Maker(own, section, name, values)
    objects = [make.secret(), make.config(), make.service()]
    if section.claim is None:
        objects.append(make.claim())
    objects.append(make.supervisor_job())
    objects += [make.worker_job(component) for component in components if component.name != SUPERVISOR]
    return objects


def _refuse_secrets(experiment: Experiment) -> None:
    if experiment.holds_secret:
        message = (
            "the experiment states a key, a token or a password, which would stand in a ConfigMap: put it into a "
            "Secret as PRIME_..., the environment's name of its key, and name that Secret in kubernetes.env_from"
        )
        raise ConfigError(message, "kubernetes.env_from")


class _Maker:
    """Builds the objects of one run."""

    def __init__(self, experiment: Experiment, section: KubernetesConfig, name: str, values: Values) -> None:
        self._experiment, self._section, self._name, self._values = experiment, section, name, values

    def _metadata(self, name: str, component: str) -> Manifest:
        namespace = {} if self._section.namespace is None else {"namespace": self._section.namespace}
        return {"name": name, **namespace, "labels": self._labels(component)}

    def _labels(self, component: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "prime-hpc",
            "app.kubernetes.io/instance": self._name,
            "app.kubernetes.io/component": component,
        }

    def secret(self) -> Manifest:
        """Return the run's key."""
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata(f"{self._name}-key", SUPERVISOR),
            "type": "Opaque",
            "immutable": True,  # a new rendering's key would lock out the pods of a run that goes on
            "stringData": {"key": self._values.key},
        }

    def config(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(self._name, SUPERVISOR),
            "immutable": True,  # a run that goes on would take another experiment when its pod is made again
            "data": {"experiment.yaml": stated_text(self._experiment)},
        }

    def service(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(self._name, "pods"),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {k: v for k, v in self._labels("").items() if v},
                "ports": [{"name": "pods", "port": PORT, "targetPort": PORT}],
            },
        }

    def claim(self) -> Manifest:
        """Return the shared volume: it outlives the run."""
        metadata = self._metadata(self._name, "volume")
        metadata["annotations"] = {"helm.sh/resource-policy": "keep"}
        spec: Manifest = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": self._values.storage}},
        }
        if self._values.storage_class is not None:
            spec["storageClassName"] = self._values.storage_class
        return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}

    def supervisor_job(self) -> Manifest:
        """Supervisor and orchestrator. Its pod is made again as long as the run is to come back."""
        host = f"{self._name}-{SUPERVISOR}"
        environment = [
            {"name": NODE, "value": f"{host}.{self._name}"},
            {"name": PODS, "value": describe_pods(self._experiment)},
        ]
        command = [self._section.python, "-P", "-m", "prime_hpc.launch.pods", f"{ABOUT}/experiment.yaml"]
        pod = self._pod(SUPERVISOR, command, environment, more={"hostname": host, "restartPolicy": "Never"})
        spec = pod["spec"]
        spec["containers"][0]["volumeMounts"].append({"name": "experiment", "mountPath": ABOUT, "readOnly": True})
        spec["volumes"].append({"name": "experiment", "configMap": {"name": self._name}})
        on_exit = {"containerName": SUPERVISOR, "operator": "In", "values": FINAL_CODES}
        rules: list[Manifest] = [{"action": "FailJob", "onExitCodes": on_exit}]
        rules.append({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(host, SUPERVISOR),
            "spec": {"backoffLimit": MANY, "podFailurePolicy": {"rules": rules}, "template": pod},
        }

    def worker_job(self, component: Component) -> Manifest:
        """Return the pods of one kind, each of which starts what the supervisor says."""
        job = f"{self._name}-{component.name}"
        index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_ANNOTATION}']"}}
        environment: list[Manifest] = [
            {"name": INDEX, "valueFrom": index},
            {"name": NODE, "value": f"{job}-$({INDEX}).{self._name}"},
        ]
        command = [self._section.python, "-P", "-m", "prime_hpc.kubernetes.pod"]
        pod = self._pod(component.name, command, environment, more={"restartPolicy": "OnFailure"})
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(job, component.name),
            "spec": {
                "completionMode": "Indexed",
                "completions": component.num_pods,
                "parallelism": component.num_pods,
                "backoffLimit": MANY,
                "template": pod,
            },
        }

    def _pod(self, component: str, command: list[str], environment: list[Manifest], more: Manifest) -> Manifest:
        """Return a pod's template: the shared volume, the key, /dev/shm, its own address."""
        values, mount = self._values, self._section.mount_path
        own = {"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        container: Manifest = {
            "name": component,
            "image": values.image,
            "command": command,
            "workingDir": mount,
            "env": [own, {"name": KEY_FILE, "value": f"{KEY_DIR}/key"}, *environment],
            "envFrom": values.env_from,
            "securityContext": values.container_security_context,
            "resources": values.resources[component],
            "volumeMounts": [
                {"name": "shared", "mountPath": mount},
                {"name": "key", "mountPath": KEY_DIR, "readOnly": True},
                {"name": "memory", "mountPath": "/dev/shm"},
            ],
        }
        volumes = [
            {"name": "shared", "persistentVolumeClaim": {"claimName": self._section.claim or self._name}},
            # readable by an image's own user: without an fsGroup the file is root's
            {"name": "key", "secret": {"secretName": f"{self._name}-key", "defaultMode": 0o444}},
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": values.shared_memory}},
        ]
        spec = {
            "subdomain": self._name,
            **more,
            "terminationGracePeriodSeconds": self._section.grace_s,
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "imagePullSecrets": values.image_pull_secrets,
            "nodeSelector": values.node_selector,
            "tolerations": values.tolerations,
            "securityContext": values.security_context,
            "containers": [container],
            "volumes": volumes,
        }
        return {"metadata": {"labels": self._labels(component)}, "spec": spec}
