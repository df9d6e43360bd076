"""What a kubelet would do with the Jobs of `render --target kubernetes`, on this machine: their containers' commands as
processes, each with the volumes, the names and the address of its pod, started again as the Jobs say.

Every pod has an address of 127.0.0.0/8 and, in a mount namespace of its own, an /etc/hosts with the names that the
headless service would give.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Manifest = dict[str, Any]
_ENTER = 'mount --make-rprivate / && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def can_unshare() -> bool:
    """Whether this user may give a process a mount namespace."""
    tried = shutil.which("unshare") and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    return bool(tried)


@dataclass
class Pod:
    """One pod: its process lives on in the next one of the same name."""

    name: str
    job: Manifest
    index: int
    address: str
    process: "subprocess.Popen[bytes] | None" = None
    exits: list[int] = field(default_factory=list)

    @property
    def spec(self) -> Manifest:
        return self.job["spec"]["template"]["spec"]

    @property
    def container(self) -> Manifest:
        return self.spec["containers"][0]


class Kubelet:
    """Runs the Jobs of a manifest.

    Args:
        objects: the manifest.
        work: holds the volumes; the claim is `work/shared`.
    """

    def __init__(self, objects: list[Manifest], work: Path) -> None:
        self._objects, self._work = objects, work
        (self._service,) = (o["metadata"]["name"] for o in objects if o["kind"] == "Service")
        self.pods: dict[str, Pod] = {}
        for job in (o for o in objects if o["kind"] == "Job"):
            for index in range(job["spec"].get("completions", 1)):
                name = job["metadata"]["name"] + (f"-{index}" if "completions" in job["spec"] else "")
                self.pods[name] = Pod(name, job, index, f"127.0.77.{len(self.pods) + 1}")
        self._hosts = work / "hosts"
        names = [f"{pod.address} {name}.{self._service} {name}" for name, pod in self.pods.items()]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", f"127.0.0.1 {os.uname().nodename}", *names]) + "\n")
        for kind in ("ConfigMap", "Secret"):
            for made in (o for o in objects if o["kind"] == kind):
                for key, text in {**made.get("data", {}), **made.get("stringData", {})}.items():
                    path = work / kind / made["metadata"]["name"] / key
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)

    def _volumes(self, pod: Pod) -> dict[str, Path | None]:
        """Mount path in the pod -> where it is on this machine."""
        own = {volume["name"]: volume for volume in pod.spec["volumes"]}
        found: dict[str, Path | None] = {}
        for mount in pod.container["volumeMounts"]:
            volume = own[mount["name"]]
            if "secret" in volume:
                found[mount["mountPath"]] = self._work / "Secret" / volume["secret"]["secretName"]
            elif "configMap" in volume:
                found[mount["mountPath"]] = self._work / "ConfigMap" / volume["configMap"]["name"]
            elif "persistentVolumeClaim" in volume:
                found[mount["mountPath"]] = self._work / "shared"
        return found

    def start(self, name: str) -> None:
        """Make the pod (again)."""
        pod, volumes = self.pods[name], self._volumes(self.pods[name])

        def placed(text: str) -> str:
            for mount, path in sorted(volumes.items(), key=lambda item: -len(item[0])):
                if text == mount or text.startswith(f"{mount}/"):
                    return f"{path}{text.removeprefix(mount)}"
            return text

        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PRIMEHPC_", "SLURM_"))}
        stated: dict[str, str] = {}
        for entry in pod.container["env"]:
            path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            facts = {"status.podIP": pod.address}
            facts["metadata.annotations['batch.kubernetes.io/job-completion-index']"] = str(pod.index)
            value = facts[path] if path else entry["value"]
            for known, text in stated.items():
                value = value.replace(f"$({known})", text)
            stated[entry["name"]] = placed(value)
        command = [placed(word) for word in pod.container["command"]]
        assert command[0] == "/opt/prime-hpc/.venv/bin/python"
        command[0] = sys.executable
        cwd = Path(placed(pod.container["workingDir"]))
        cwd.mkdir(parents=True, exist_ok=True)
        with (self._work / f"{name}.log").open("ab") as log:
            pod.process = subprocess.Popen(
                ["unshare", "-m", "sh", "-c", _ENTER, "sh", str(self._hosts), *command],
                cwd=cwd,
                env={**environment, **stated},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def tick(self) -> None:
        """Start again what ended, where its Job says so."""
        for pod in self.pods.values():
            if pod.process is None or pod.process.poll() is None:
                continue
            code = pod.process.returncode
            pod.exits.append(code)
            pod.process = None
            rules = pod.job["spec"].get("podFailurePolicy", {}).get("rules", [])
            final: list[int] = next((rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule), [])
            if code != 0 and code not in final:
                self.start(pod.name)

    def is_over(self) -> bool:
        """Whether all Jobs are complete, or failed for good."""
        return all(pod.process is None for pod in self.pods.values())

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send the pod's first process a signal; with SIGKILL, all of the pod."""
        process = self.pods[name].process
        assert process is not None
        if number != signal.SIGKILL:
            process.send_signal(number)
            return
        import psutil

        parent = psutil.Process(process.pid)
        for one in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def close(self) -> None:
        """End everything."""
        for pod in self.pods.values():
            if pod.process is not None and pod.process.poll() is None:
                self.kill(pod.name)
                pod.process.wait()
