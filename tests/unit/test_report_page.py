"""The page of `prime-hpc report` in a real browser: every view opens, nothing complains, nothing is fetched.

Needs Playwright (in the `dev` extra) and a Chromium of the system: `apt-get install chromium`.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli import main
from tests.support.made_runs import (
    Life,
    add_batches,
    add_samples,
    add_tokens,
    config_of,
    make_run,
    make_runs_of_one_trainer,
)

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
expect = sync_api.expect
expect.set_options(timeout=60_000)  # of what is drawn in the browser's own time
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

EVIL = "</script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
ONE = ["Overview", "Curves", "Throughput", "Timeline", "Accounting", "Rollouts", "Config"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


class Page:
    """An opened report; `complaints` are all that its console said, and every request."""

    def __init__(self, browser: Any, path: Path, *, before: str = "", **context: Any) -> None:
        """Open it; `before` is a script that runs before the page's own."""
        self.tab = browser.new_page(viewport={"width": 1280, "height": 900}, **context)
        self.tab.add_init_script(before)
        self.complaints: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", lambda request: self._note(request.url))
        self.tab.goto(path.resolve().as_uri())

    def _note(self, url: str) -> None:
        if not url.startswith(("file://", "data:")):
            self.complaints.append(f"fetched {url}")

    def views(self) -> list[str]:
        return self.tab.eval_on_selector_all("nav button", "buttons => buttons.map(b => b.textContent)")

    def open(self, view: str) -> None:
        self.tab.click(f"nav button:text-is('{view}')")
        self.tab.wait_for_function(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        )


@pytest.fixture(scope="module")
def page_of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lives = [Life(0, 9, "requeued", "the time limit comes near", next="requeue"), Life(9, 15, "failed", "killed")]
    run = make_run(tmp_path_factory.mktemp("page") / "run", [*lives, Life(12, 20)])
    add_batches(run, range(1, 21))
    add_samples(run, [EVIL, "fine"])
    add_tokens(run, [3, 9])
    assert main(["report", str(run)]) == 0
    return run / "report.html"


def test_every_view_opens(browser: Any, page_of_one: Path) -> None:
    page = Page(browser, page_of_one, color_scheme="dark")
    assert page.views() == ONE
    assert page.tab.evaluate("document.documentElement.dataset.theme") == "dark"
    page.tab.click("button[aria-label='light or dark']")
    assert page.tab.evaluate("document.documentElement.dataset.theme") == "light"
    for view in ONE:
        page.open(view)
        expect(page.tab.locator("body")).to_have_attribute("data-view", view)
        assert len(page.tab.inner_text("main")) > 80, view
        wide = page.tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{view} is wider than the window"
    page.open("Throughput")
    expect(page.tab.locator("[data-split]")).to_contain_text("suggested")
    page.open("Overview")
    expect(page.tab.locator(".chart canvas").nth(2)).to_be_attached()
    assert page.complaints == []
    page.tab.close()


OLD = """
for (const [where, names] of [
  [Element.prototype, ["replaceChildren", "checkVisibility"]],
  [Array.prototype, ["at", "flat", "flatMap", "findLast", "findLastIndex", "toSorted", "toReversed", "with"]],
  [String.prototype, ["at", "replaceAll", "matchAll", "trimStart", "trimEnd", "isWellFormed"]],
  [Object, ["fromEntries", "hasOwn", "groupBy"]],
  [Promise, ["allSettled", "any", "withResolvers"]],
  [window, ["ResizeObserver", "IntersectionObserver", "queueMicrotask", "structuredClone", "OffscreenCanvas"]],
]) for (const name of names) delete where[name];
"""
"""As Chrome 68 (2018), by the functions that it lacks; what it cannot parse is not tried here."""


@pytest.mark.exhaustive
def test_every_view_opens_in_an_older_browser(browser: Any, page_of_one: Path) -> None:
    page = Page(browser, page_of_one, before=OLD)
    assert page.tab.evaluate("[].at === undefined && document.body.replaceChildren === undefined")
    for view in ONE:
        page.open(view)
        expect(page.tab.locator("body")).to_have_attribute("data-view", view)
        assert len(page.tab.inner_text("main")) > 80, view
    page.open("Rollouts")
    page.tab.fill("input[type=search]", "onerror")
    expect(page.tab.locator("tr.pick")).to_have_count(1)
    page.open("Overview")
    expect(page.tab.locator(".chart canvas").nth(2)).to_be_attached()
    expect(page.tab.locator("#trouble")).to_be_hidden()
    assert page.complaints == []
    page.tab.close()


@pytest.mark.exhaustive
def test_without_curves_all_else_is_drawn(browser: Any, page_of_one: Path, tmp_path: Path) -> None:
    """A browser that cannot parse uPlot says so, and shows the other views."""
    text = page_of_one.read_text()
    assert "var uPlot=function" in text
    (tmp_path / "page.html").write_text(text.replace("var uPlot=function", "var uPlot=??=function"))
    page = Page(browser, tmp_path / "page.html")
    expect(page.tab.locator("#trouble")).to_contain_text("This browser could not draw all of this page")
    expect(page.tab.locator("#trouble")).to_contain_text("prime-hpc report RUN --json")
    for view in ONE:
        page.open(view)
        assert len(page.tab.inner_text("main")) > 80, view
    page.open("Curves")
    expect(page.tab.locator("[data-chart='Reward']")).to_contain_text("curves need a browser of 2020")
    assert len(page.complaints) == 1 and "Unexpected" in page.complaints[0]
    page.tab.close()


def test_text_of_a_rollout_never_runs(browser: Any, page_of_one: Path) -> None:
    page = Page(browser, page_of_one)
    page.open("Rollouts")
    page.tab.fill("input[type=search]", "onerror")
    page.tab.wait_for_function("() => document.querySelectorAll('tr.pick').length === 1")
    expect(page.tab.locator(".card.text")).to_contain_text(EVIL)
    assert page.tab.title() == "run" and page.complaints == []
    page.tab.close()


def test_rollouts_are_read_token_by_token(browser: Any, page_of_one: Path) -> None:
    page = Page(browser, page_of_one)
    page.open("Rollouts")
    page.tab.select_option("select[aria-label=kind]", "best")
    first = page.tab.inner_text("tr.pick.on")
    tokens = page.tab.locator(".turn.policy .tokens span")
    expect(tokens).to_have_count(6)
    assert "by the engine, version" in (tokens.first.get_attribute("title") or "")
    page.tab.select_option("select[aria-label='colour tokens by']", "version")
    expect(page.tab.locator(".card.text .bar")).to_contain_text("version")
    page.tab.locator("tr.pick").nth(3).click()
    expect(page.tab.locator("tr.pick.on")).not_to_have_text(first, use_inner_text=True)
    page.tab.select_option("select[aria-label=kind]", "both sides")
    expect(page.tab.locator("tr.pick")).to_have_count(4)
    page.tab.select_option("select[aria-label='colour tokens by']", "gap")
    expect(page.tab.locator(".card.text .bar")).to_contain_text("far apart")
    assert " by the trainer" in (tokens.first.get_attribute("title") or "")
    assert float((tokens.first.get_attribute("style") or "").rsplit(",", 1)[1].rstrip(")")) == 0.6  # log 2 is far
    page.tab.select_option("select[aria-label=kind]", "")
    expect(page.tab.locator("tr.pick")).to_have_count(40)
    page.tab.click("button[data-next]")
    expect(page.tab.locator(".reader")).to_contain_text("page 2 of")
    assert page.complaints == []
    page.tab.close()


@pytest.mark.exhaustive
def test_the_timeline_zooms_to_a_step_and_says_what_it_is(browser: Any, page_of_one: Path) -> None:
    page = Page(browser, page_of_one)
    page.open("Timeline")
    length = page.tab.evaluate("P.lastTimeline.range()[2]")
    box = page.tab.locator("canvas.timeline").bounding_box()
    page.tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    for _ in range(12):
        page.tab.mouse.wheel(0, -200)
    page.tab.wait_for_function(
        "length => P.lastTimeline.range()[1] - P.lastTimeline.range()[0] < 0.2 * length", arg=length
    )
    page.tab.select_option("select[aria-label=attempt]", "1")
    page.tab.wait_for_function(
        "length => { const [a, b] = P.lastTimeline.range(); return 0 < a && a < b && b < length; }", arg=length
    )
    lane = page.tab.evaluate("P.lastTimeline.lanes.findIndex(lane => lane.name === 'trainer')")
    page.tab.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 26 + 34 * lane + 13)
    page.tab.wait_for_function("() => /trainer, step \\d+/.test(document.querySelector('.tip').textContent)")
    assert page.complaints == []
    page.tab.close()


@pytest.mark.exhaustive
def test_several_runs_side_by_side(browser: Any, tmp_path: Path) -> None:
    for index, lr in enumerate((1e-6, 3e-6, 1e-5)):
        config = config_of(f"p{index}", trainer__optim__lr=lr, seed=index % 2)
        make_run(tmp_path / "sweep" / f"p{index}", [Life(0, 20)], config=config, seed=index)
    shutil.copytree(tmp_path / "sweep" / "p1", tmp_path / "sweep" / "p1-copy")
    assert main(["report", str(tmp_path / "sweep"), "--output", str(tmp_path / "x.html")]) == 0
    page = Page(browser, tmp_path / "x.html")
    assert page.views() == ["Compare", *ONE]
    expect(page.tab.locator("path.line")).to_have_count(4)
    expect(page.tab.locator("main table thead").first).to_contain_text("trainer.optim.lr")
    names = page.tab.locator("main table").first.locator("th").all_text_contents()
    total = page.tab.locator("main table").first.locator("tr.total td").all_text_contents()
    hours = dict(zip(names, total, strict=True))
    assert hours["run"] == "all" and hours["attempts"] == "3", "a copy of a run is not counted again"
    assert float(hours["hours"]) == pytest.approx(3 * 51 / 3600, rel=0.01), "10 s of start, 20 steps of 2 s, 1 s"
    assert hours["loss (last step)"] == "" and hours["effective training time"].endswith("%")
    axis = page.tab.locator("rect.hit").first.bounding_box()
    page.tab.mouse.move(axis["x"] + axis["width"] / 2, axis["y"] + 2)
    page.tab.mouse.down()
    page.tab.mouse.move(axis["x"] + axis["width"] / 2, axis["y"] + axis["height"] / 4)
    page.tab.mouse.up()
    expect(page.tab.locator("path.line.off").first).to_be_attached()
    assert page.tab.locator("path.line.off").count() < 4
    page.tab.select_option("select[aria-label=metric]", "trainer: entropy")
    expect(page.tab.locator("[data-chart='trainer: entropy'] canvas")).to_have_count(1)
    page.tab.locator("tr.pick").nth(1).click()
    page.open("Config")
    page.tab.select_option("select[aria-label='compare with']", "0")
    expect(page.tab.locator("td.diff")).to_have_count(6)  # name, learning rate and seed, of both
    assert page.complaints == []
    page.tab.close()


@pytest.mark.exhaustive
def test_runs_of_one_trainer(browser: Any, tmp_path: Path) -> None:
    """The parent, which has no reward of its own, and the three runs below it, each with every view."""
    parent = make_runs_of_one_trainer(tmp_path / "many", {"fast": 1e-2, "middle": 3e-3, "slow": 1e-3}, steps=12)
    assert main(["report", str(parent)]) == 0
    page = Page(browser, parent / "report.html")
    assert page.views() == ["Compare", *ONE]
    names = ["many", "many/run_fast", "many/run_middle", "many/run_slow"]
    rows = page.tab.locator("main table").first.locator("tbody tr")
    expect(rows).to_have_count(5)  # the last: their sum
    assert [rows.nth(n).locator("td").first.inner_text() for n in range(4)] == names
    heads = page.tab.locator("main table").first.locator("thead th").all_inner_texts()
    hours = [rows.nth(n).locator("td").nth(heads.index("hours")).inner_text() for n in (0, 4)]
    assert hours[0] == hours[1], "what the runs below took is part of their parent's"
    expect(page.tab.locator("main table thead").first).to_contain_text("trainer.optim.lr")
    chosen = page.tab.locator("header select")
    for index in range(4):
        for view in ONE:
            page.tab.evaluate("([view, index]) => P.open(view, index)", [view, index])
            expect(page.tab.locator("body")).to_have_attribute("data-view", view)
            expect(chosen).to_have_value(str(index))
            assert len(page.tab.inner_text("main")) > 80, (names[index], view)
            wide = page.tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{view} of {names[index]} is wider than the window"
    page.tab.evaluate("P.open('Curves', 1)")
    expect(page.tab.locator("[data-chart='Reward'] canvas")).to_have_count(1)
    expect(page.tab.locator("#trouble")).to_be_hidden()
    assert page.complaints == []
    page.tab.close()


@pytest.mark.exhaustive
def test_an_empty_run_opens_too(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [])
    assert main(["report", str(run)]) == 0
    page = Page(browser, run / "report.html")
    for view in ONE:
        page.open(view)
    assert page.complaints == []
    page.tab.close()
