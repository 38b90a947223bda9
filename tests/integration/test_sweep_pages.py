"""Report of a sweep in a browser: parallel coordinates by pointer and by keys, in the table and in the curves."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from helpers.browser import Browser

from clipx.report.sweep import SweepReport
from clipx.report.sweep_groups import Metric, SweepRun

pytestmark = pytest.mark.slow

TOP1 = "eval/zeroshot/top1"
SVG = ".parallel svg"


def run(name: str, value: float | None, state: str = "finished", **overrides: str) -> SweepRun:
    """Returns a run that was evaluated twice and ended with `value`, none if it failed."""
    keys = {key.replace("_", "."): text for key, text in overrides.items()}
    row = {"step": 1, "samples": 32, "epoch": 0.5, "seconds": 0.0, "train/loss": 2.0}
    rows = [row] if value is None else [{**row, TOP1: value / 2}, {**row, "step": 2, "samples": 64, TOP1: value}]
    return SweepRun(
        name=name, overrides=keys, seed=keys.get("seed", "0"), state=state, progress=state, command=f"train {name}",
        rows=rows, events=[], values=rows[-1], step=2, seconds=1.0, samples_per_second=None,
    )  # fmt: skip


def grid() -> list[SweepRun]:
    """Returns 8 runs of 2 objectives and 2 learning rates, those of a learning rate with equal values, and a failed one."""
    found = [
        run(str(k), {"1e-3": 0.25, "1e-2": 0.5}[lr] + 0.25 * int(seed), objective=objective, optimizer_lr=lr, seed=seed)
        for k, (objective, lr, seed) in enumerate(product(("infonce", "dcl"), ("1e-3", "1e-2"), "01"))
    ]
    return [*found, run("8", None, "failed", objective="dcl", optimizer_lr="1e30", seed="0")]


def show(browser: Browser, folder: Path, runs: list[SweepRun], width: int = 1300) -> None:
    page = SweepReport("sweep", ["train -m"], runs, Metric((TOP1,))).page()
    (folder / "page.html").write_text(page, encoding="utf-8")
    browser.open(folder / "page.html", width)
    browser.wait_for("document.querySelectorAll('.parallel .area').length > 0")


def chosen(browser: Browser) -> list[str]:
    """Returns the name of the highlighted run in the table, after that in the curves."""
    group = browser("clipxCharts.groups.runs.run")
    return [*browser.texts("tr.chosen td:first-child"), *([] if group is None else [group])]


def visible(browser: Browser) -> list[str]:
    return browser.texts("tr[data-run]:not([hidden]) td:first-child")


def test_the_run_under_the_pointer_is_highlighted_everywhere(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, grid())
    browser.place(SVG, 0.5, 0.5)
    x, y = browser(
        "(() => { const p = document.querySelector('.parallel .best'), at = p.getPointAtLength(p.getTotalLength() - 3),"
        " box = p.ownerSVGElement.getBoundingClientRect(); return [box.x + at.x, box.y + at.y]; })()"
    )
    browser.mouse("Moved", (x, y))
    assert chosen(browser) == ["3", "r3"], "the first of the equal best ones"
    assert browser.texts(".parallel .tip") == [
        "3objectiveinfonceoptimizer.lr1e-2seed1statefinishedzeroshot/top1, %75.00",
    ]  # fmt: skip
    assert browser("document.querySelectorAll('figure.chart .chosen').length") == 2
    assert browser.texts(".parallel p")[0].startswith("A line for each of 9 runs, the best one wide; dashed: without")


def test_a_range_of_an_axis_and_a_click_on_a_line_select_runs(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, grid())
    area = ".parallel rect.area:last-of-type"
    browser.drag(browser.place(area, 0.5, 0.02), browser.place(area, 0.5, 0.3))
    assert visible(browser) == ["3", "7"]
    assert browser.texts(".parallel p") == ["2 of 9 runs are selected."]
    assert browser("document.querySelectorAll('figure.chart[data-group=runs] .series').length") == 4
    browser("document.querySelector('.parallel button').click()")
    assert len(visible(browser)) == 9


def test_keys_go_through_the_runs_in_the_order_of_the_table(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, grid())
    browser("[...document.querySelectorAll('table:has(tr[data-run]) th button')].at(4).focus()")
    browser("[...document.querySelectorAll('table:has(tr[data-run]) th button')].at(5).click()")
    order = visible(browser)
    assert order == ["3", "7", "1", "2", "5", "6", "0", "4", "8"], "sorted by the metric"
    browser("document.querySelector('.parallel svg').focus()")
    for key, name in (("ArrowRight", "3"), ("ArrowDown", "7"), ("ArrowDown", "1"), ("ArrowLeft", "7")):
        browser.key(key)
        assert chosen(browser) == [name, f"r{name}"]
    assert browser.texts(".parallel .tip:not([hidden]) .where") == ["7"]
    browser.key("Enter")
    browser.key("ArrowRight")
    browser.key("Enter")
    assert visible(browser) == ["7", "1"]
    browser.key("Escape")
    assert len(visible(browser)) == 9


@pytest.mark.parametrize("width", [1300, 320])
def test_lines_and_labels_do_not_hide_each_other(browser: Browser, tmp_path: Path, width: int) -> None:
    """Equal runs too, and the values 1e-3 and 1e-2 beside 1e30."""
    show(browser, tmp_path, grid(), width)
    assert browser("document.documentElement.scrollWidth") <= width
    assert browser("document.querySelector('.parallel').classList.contains('upright')") is (width == 1300)
    labels = browser.texts(".parallel .label")
    assert {"infonce", "dcl", "1e-3", "1e-2", "1e30", "0", "1", "25.00", "50.00", "75.00"} == set(labels)
    assert browser.texts(".parallel .name") == ["objective", "optimizer.lr (log)", "seed", "zeroshot/top1, %"]
    assert browser("new Set([...document.querySelectorAll('.parallel .run')].map(p => p.getAttribute('d'))).size") == 9
    hidden = browser("""(() => {
      const texts = [...document.querySelectorAll('.parallel text')].map(e => e.getBBox()), found = [];
      const view = document.querySelector('.parallel svg').viewBox.baseVal;
      texts.forEach((a, i) => {
        if (a.x < 0 || a.x + a.width > view.width || a.y < 0 || a.y + a.height > view.height) found.push(['cut', i]);
        texts.slice(i + 1).forEach(b => {
          if (a.x < b.x + b.width && b.x < a.x + a.width && a.y + 3 < b.y + b.height && b.y + 3 < a.y + a.height) found.push(['text', i]);
        });
        for (const line of document.querySelectorAll('.parallel .run')) for (const part of line.getAttribute('d').match(/M[^M]*/g) ?? []) {
          const [x, y, u, v] = part.match(/[-0-9.]+/g).map(Number);
          for (let t = 0; t <= 1; t += .02) {
            const [p, q] = [x + t * (u - x), y + t * (v - y)];
            if (p > a.x + 1 && p < a.x + a.width - 1 && q > a.y + 2 && q < a.y + a.height - 2) { found.push(['line', i]); break; }
          }
        }
      });
      return found;
    })()""")
    assert hidden == []


def test_hostile_names_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror='window.hit=1'><script>window.hit=1</script>"
    runs = [run(f"{k} {hostile}", 0.1 * k, objective=f"{hostile} {k}", seed="0") for k in range(3)]
    runs += [run("alone", None, "failed", **{hostile: hostile})]
    show(browser, tmp_path, runs)
    browser("document.querySelector('.parallel svg').focus()")
    browser.key("ArrowRight")
    assert hostile in browser.texts(".parallel .tip:not([hidden])")[0]
    for place in ("figure.chart[data-group=runs] svg.plot", "figure.chart[data-group=against] svg.plot"):
        browser.mouse("Moved", browser.place(place, 0.9, 0.4))
        assert hostile in browser.texts(".tip:not([hidden])")[-1]
    assert browser("window.hit === undefined && !document.querySelector('img')")
