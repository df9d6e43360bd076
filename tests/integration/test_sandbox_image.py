"""Sandboxes in an image, by apptainer: what is the image's, what is shown of the node, and what is refused."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from prime_hpc.config.sections.orchestrator import SandboxConfig
from prime_hpc.envs.errors import EnvError
from tests.support.sandboxes import IMAGE, members, namespace_of, needs_sandboxes, play, sandbox

in_image = [pytest.mark.skipif(not IMAGE, reason="PRIME_HPC_TEST_SANDBOX_IMAGE names no image"), needs_sandboxes()]


def test_an_image_and_its_runtime_are_stated_together() -> None:
    for stated in ({"runtime": "apptainer"}, {"image": "/x.sif"}, {"runtime": "apptainer", "image": "docker://python"}):
        with pytest.raises(ValidationError, match="image"):
            SandboxConfig.model_validate(stated)


def test_a_node_without_apptainer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvError, match="there is no apptainer on"):
        play("pass", runtime="apptainer", image=str(tmp_path))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


class TestInImage:
    """Where this machine has apptainer."""

    pytestmark = in_image

    def test_the_system_is_the_image_s_and_of_the_node_only_what_is_named(
        self, open_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where a site has every container show more (`APPTAINER_BIND`)."""
        for name in ("shown", "hidden"):
            (open_folder / name).mkdir()
            (open_folder / name / "file").write_text(name)
        monkeypatch.setenv("APPTAINER_BIND", f"{open_folder}/hidden:/mnt")
        monkeypatch.setenv("APPTAINERENV_SECRET", "hidden-word")
        program = (
            "import json, os, sys\n"
            "facts = {'python': sys.version, 'mnt': os.listdir('/mnt'), 'environ': dict(os.environ)}\n"
            f"print(json.dumps(facts | {{'shown': open('{open_folder}/shown/file').read()}}))\n"
            f"open('{open_folder}/shown/new', 'w')"
        )
        (ended,) = play(program, read_only=[str(open_folder / "shown")])
        facts = json.loads(ended.stdout)
        assert facts["shown"] == "shown" and "Read-only" in ended.verdict
        assert facts["python"] != sys.version and facts["mnt"] == []
        assert not {name for name in facts["environ"] if name.startswith(("APPTAINER", "SINGULARITY", "SECRET"))}
        assert "/usr/bin" in facts["environ"]["PATH"]

    def test_what_cannot_be_an_image_is_refused_with_the_reason(self, open_folder: Path) -> None:
        with pytest.raises(EnvError, match=r"sandbox.image: /nothing-here is not there"):
            play("pass", image="/nothing-here")
        for name in ("proc", "dev", "tmp", "etc", "usr", "bin", "sys"):
            (open_folder / name).mkdir()
        with pytest.raises(EnvError, match=r"python3"):
            play("pass", image=str(open_folder))
        with pytest.raises(EnvError, match=r"sandbox.read_only: /a,b: apptainer takes no path|is not there"):
            play("pass", read_only=["/a,b"])

    def test_a_node_whose_containers_show_more_makes_none(
        self, open_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As `bind path` of a site's apptainer.conf would, were it not switched off."""
        real, wrapper = shutil.which("apptainer"), open_folder / "apptainer"
        wrapper.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\n'
            f'one=$1 two=$2; shift 2; exec {real} "$one" "$two" --bind /var/log:/mnt "$@"\n'
        )
        wrapper.chmod(0o755)
        monkeypatch.setenv("PATH", f"{open_folder}:{os.environ['PATH']}")
        with pytest.raises(EnvError, match=r"the node shows /mnt in every container.*no sandbox can be made there"):
            play("pass")

    def test_one_that_hangs_is_ended_from_outside(self) -> None:
        async def run() -> None:
            async with sandbox(command_s=600) as box:
                namespace = namespace_of(box)
                running = asyncio.create_task(box.run(["sleep", "600"]))
                async with asyncio.timeout(200):
                    while len(members(namespace)) < 2:
                        await asyncio.sleep(0.02)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                async with asyncio.timeout(200):
                    while members(namespace) or box.is_alive():
                        await asyncio.sleep(0.02)

        asyncio.run(run())

    def test_without_its_runtime_s_process_nothing_of_it_goes_on(self) -> None:
        async def run() -> None:
            async with sandbox(command_s=600) as box:
                namespace = namespace_of(box)
                running = asyncio.create_task(box.run(["sleep", "600"]))
                async with asyncio.timeout(200):
                    while len(members(namespace)) < 2:
                        await asyncio.sleep(0.02)
                os.kill(box.pid, signal.SIGKILL)
                assert (await running).ended_by == "gone"
                async with asyncio.timeout(200):
                    while members(namespace):
                        await asyncio.sleep(0.02)

        asyncio.run(run())
