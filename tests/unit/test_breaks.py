"""tools/breaks: each break on purpose finds its place in today's source, so that it can be tried at any time."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "breaks"


def test_every_break_has_its_place_and_its_tests() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--list"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 10
