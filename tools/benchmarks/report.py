"""How long `prime-hpc report` takes for large runs, its memory, the size of the page, how fast it is drawn. Run by
`tools/bench report`.

Two made-up runs, written by the product's own writers (`tests.support.made_runs`): one of 10,000 steps with 10,000
batches of ten rollouts, and one with 10 million rows of metrics (PRIME_HPC_BENCH_ROWS: another number) and no batch. A
frame is what lies between two callbacks of `requestAnimationFrame` while the wheel turns at each; without a Chromium
the times of drawing are left out. Takes about 10 minutes, 1 GB of disk and 0.3 GB of /dev/shm.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, SEQUENCES = 10_000, 10
ROWS = int(os.environ.get("PRIME_HPC_BENCH_ROWS", "10000000"))
VIEWS = ("Overview", "Curves", "Throughput", "Timeline", "Accounting", "Rollouts", "Config")
TIMEOUT_S = 1800
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_OPEN = """name => new Promise(done => {
  const began = performance.now();
  P.open(name);
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - began), 0));
})"""
"""Milliseconds until what a view drew is on the screen."""
_ZOOM = """([selector, frames]) => new Promise(done => {
  const canvas = document.querySelector(selector), box = canvas.getBoundingClientRect(), times = [];
  let last = 0, count = 0;
  const turn = now => {
    if (last) times.push(now - last);
    last = now;
    if ((count += 1) > frames) { done(times); return; }
    const at = { clientX: box.left + 0.7 * box.width, clientY: box.top + 40, bubbles: true, cancelable: true };
    canvas.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: count % 40 < 20 ? -120 : 120 }));
    requestAnimationFrame(turn);
  };
  requestAnimationFrame(turn);
})"""


def run() -> dict[str, Any]:
    """Make both runs, the page of each, and zoom in the first."""
    from tests.support.made_runs import Life, add_batches, make_run

    figures: dict[str, Any] = {"load": os.getloadavg()[0], "cpus": os.cpu_count()}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # batches are synced one by one: disks take minutes
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir=memory) as quick:
        steps = make_run(Path(quick) / "steps", [Life(0, STEPS // 2, "requeued"), Life(STEPS // 2, STEPS)])
        add_batches(steps, range(1, STEPS + 1), sequences=SEQUENCES)
        figures["steps"] = {"steps": STEPS, "rollouts": STEPS * SEQUENCES, **_report(steps)}
        figures["browser"] = _drawn(steps / "report.html")
        shutil.rmtree(steps)
        rows = make_run(Path(directory) / "rows", [Life(0, 1)])
        size = _many_rows(rows)
        figures["rows"] = {"rows": ROWS, "metrics_mb": size, **_report(rows)}
    return figures


def _many_rows(run_dir: Path) -> float:
    """Write half of the rows as the trainer's and half as the orchestrator's; returns megabytes."""
    began, total = 1_790_000_000.0, 0
    for role, key in (("trainer", "loss"), ("orchestrator", "reward/mean")):
        path = run_dir / "metrics" / f"{role}.jsonl"
        with path.open("w") as file:
            for step in range(1, ROWS // 2 + 1):
                value = ((step * 2_654_435_761) % 1000) / 1000
                row = f'"step": {step}, "time": {began + step:.3f}, "{key}": {value}, "time/step": 1.0, "lag/mean": 1.0'
                file.write(f"{{{row}}}\n")
        total += path.stat().st_size
    return total / 1e6


def _report(run_dir: Path) -> dict[str, float]:
    """Make the page in a process of its own: wall and CPU seconds, peak memory, size."""
    command = [sys.executable, "-c", "import sys; from prime_hpc.cli import main; sys.exit(main())", "report"]
    began = time.perf_counter()
    process = subprocess.Popen([*command, str(run_dir)], stdout=subprocess.DEVNULL)
    peak = 0.0
    while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        peak = max(peak, _peak_mb(process.pid))
        time.sleep(0.05)
    _, status, used = ended
    wall = time.perf_counter() - began
    if status:
        raise RuntimeError(f"prime-hpc report ended with {os.waitstatus_to_exitcode(status)}")
    page = (run_dir / "report.html").stat().st_size
    cpu = used.ru_utime + used.ru_stime
    return {"wall_s": wall, "cpu_s": cpu, "memory_mb": peak, "page_mb": page / 1e6}


def _peak_mb(pid: int) -> float:
    """Most memory that a process has held, by proc(5); rusage would tell this process's own before the exec, too."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _drawn(page: Path) -> dict[str, Any] | None:
    """Open every view and zoom; None without a browser."""
    chromium = next(filter(None, map(shutil.which, _BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.set_default_timeout(TIMEOUT_S * 1000)
        began = time.perf_counter()
        tab.goto(page.resolve().as_uri())
        opened_s = time.perf_counter() - began
        views = {name: tab.evaluate(_OPEN, name) for name in VIEWS}
        tab.evaluate(_OPEN, "Timeline")
        frames = sorted(tab.evaluate(_ZOOM, ["canvas.timeline", 120]))
        idle = sorted(tab.evaluate(_ZOOM, ["nav", 120]))
        version = browser.version
        browser.close()
    return {
        "version": version,
        "opened_s": opened_s,
        "views_ms": views,
        "frames": len(frames),
        "frame_ms": {"median": statistics.median(frames), "p95": frames[len(frames) * 95 // 100], "max": frames[-1]},
        "idle_frame_ms": statistics.median(idle),
    }


def render(figures: dict[str, Any]) -> str:
    """A line a run, and what the browser did."""
    lines = [f"{figures['cpus']} cores, load {figures['load']:.1f} at the begin"]
    for name, of in (("steps", f"{STEPS:,} steps, {STEPS * SEQUENCES:,} rollouts"), ("rows", f"{ROWS:,} metric rows")):
        one = figures[name]
        lines.append(
            f"{of}: {one['wall_s']:.1f} s ({one['cpu_s']:.1f} s of a core), {one['memory_mb']:.0f} MB of memory, "
            f"a page of {one['page_mb']:.1f} MB"
        )
    drawn = figures["browser"]
    if drawn is None:
        return "\n".join([*lines, "no Chromium (apt-get install chromium) or no Playwright here: nothing was drawn"])
    views = ", ".join(f"{name} {value:.0f}" for name, value in drawn["views_ms"].items())
    frame = drawn["frame_ms"]
    lines += [
        f"Chromium {drawn['version']}: opened in {drawn['opened_s']:.1f} s; milliseconds to draw a view: {views}",
        f"timeline while it zooms, {drawn['frames']} frames: median {frame['median']:.0f} ms, 95 % within "
        f"{frame['p95']:.0f} ms, longest {frame['max']:.0f} ms (with nothing to draw: {drawn['idle_frame_ms']:.0f} ms)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(run()))
