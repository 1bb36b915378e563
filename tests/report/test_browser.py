"""Pages in a real browser: nothing fails or is loaded, every stage is reached by mouse and by
keyboard, with and without scripts; dark, narrow, and for screen readers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gtco.report.compiled import with_report
from gtco.report.difference import difference
from gtco.report.page import difference_page, page
from tests.report.browser import Tab, browser, installed
from tests.report.test_page import timed

CHROMIUM = installed()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser: apt-get install --no-install-recommends chromium"
)
SHOWN = """(() => {
  const shown = [...document.querySelectorAll('.stage')].filter(s => s.offsetParent !== null);
  return shown.map(s => s.id);
})()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Tab:
    assert CHROMIUM is not None
    with browser(CHROMIUM, tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def files(made, narrow, shaped, tmp_path_factory) -> dict[str, Path]:
    """The pages by what they are about."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "report": page(with_report(timed(made.facts), made.report)),
        "variants": page(shaped.facts),
        "difference": difference_page(difference(made.facts, narrow.facts)),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in pages}


@pytest.fixture(autouse=True)
def nothing_fails(tab):
    tab.problems.clear()
    yield
    assert tab.problems == []


def test_the_checks_see_what_is_wrong(tab, tmp_path):
    bad = "<img src='http://127.0.0.1:9/x.png'><script>nothing()</script>"
    (tmp_path / "bad.html").write_text(bad)
    tab.open(tmp_path / "bad.html")
    tab.wait("true")
    found = " ".join(tab.problems)
    assert "nothing is not defined" in found and "asks for http://127.0.0.1:9" in found
    tab.problems.clear()
    tab.open(Path("/dev/null"))
    tab.problems.clear()


@pytest.mark.parametrize("name", ["report", "variants", "difference"])
@pytest.mark.parametrize("width", [380, 820, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_load_and_fit_the_window(tab, files, name, width, scheme):
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    tab.call("Emulation.setEmulatedMedia", features=media)
    tab.open(files[name], width)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    red = int(
        tab.evaluate(
            "getComputedStyle(document.documentElement).backgroundColor.match(/[0-9]+/)[0]"
        )
    )
    assert red < 64 if scheme == "dark" else red > 192
    # the letters of a picture are as readable as the page's
    fills = tab.evaluate(
        "[...document.querySelectorAll('svg.chart text')].map(t => getComputedStyle(t).fill)"
    )
    assert fills and "rgb(0, 0, 0)" not in fills


@pytest.mark.parametrize("scripts", [True, False])
def test_every_stage_opens_by_a_click_on_its_box_and_its_row(tab, files, made, scripts):
    tab.call("Emulation.setScriptExecutionDisabled", value=not scripts)
    try:
        tab.open(files["report"])
        assert tab.evaluate(SHOWN) == []
        for stage in made.facts.models[0].stages:
            for place in (f"#box-{stage.number}", f".stages a[href='#stage-{stage.number}']"):
                tab.evaluate("location.hash = '#main'")
                tab.wait(f"{SHOWN}.length === 0")
                tab.click(place)
                tab.wait(f"{SHOWN}.join() === 'stage-{stage.number}'")
                marked = f"document.querySelector('#box-{stage.number}').matches('.chosen')"
                if scripts:
                    tab.wait(marked)
                else:
                    assert not tab.evaluate(marked)
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)


def test_every_stage_is_reached_by_the_keyboard(tab, files, made):
    count = len(made.facts.models[0].stages)
    tab.open(files["report"])
    found: list[str] = []
    for _ in range(count + 20):  # past what stands before the picture
        tab.key("Tab")
        at = tab.evaluate("document.activeElement.id")
        found += [at] if at.startswith("box-") else []
    assert found == [f"box-{number}" for number in range(count)][: len(found)] and found
    tab.open(files["report"])
    while tab.evaluate("document.activeElement.id") != "box-0":
        tab.key("Tab")
    tab.key("Enter")
    tab.wait(f"{SHOWN}.join() === 'stage-0'")
    for number in range(1, count):
        tab.key("ArrowDown")
        tab.wait(f"{SHOWN}.join() === 'stage-{number}'")
    tab.key("ArrowDown")  # there is none after the last
    tab.key("ArrowUp")
    tab.wait(f"{SHOWN}.join() === 'stage-{count - 2}'")
    tab.key("Escape")
    tab.wait(f"{SHOWN}.length === 0")


def test_the_chosen_box_is_in_view(tab, files, made):
    last = len(made.facts.models[0].stages) - 1
    tab.open(files["report"], height=500)
    for number in (last, 0):
        tab.evaluate(f"location.hash = '#stage-{number}'")
        tab.wait(f"{SHOWN}.join() === 'stage-{number}'")
        tab.wait(
            f"""(() => {{
              const box = document.querySelector('#box-{number}');
              const at = box.getBoundingClientRect();
              const pane = box.closest('.scroll').getBoundingClientRect();
              return at.bottom > pane.top && at.top < pane.bottom;
            }})()"""
        )


def test_variants_do_not_mix(tab, files, shaped):
    tab.open(files["variants"])
    tab.click("#v1-box-0")
    tab.wait(f"{SHOWN}.join() === 'v1-stage-0'")
    chosen = "document.querySelectorAll('.box.chosen').length"
    tab.wait(f"{chosen} > 0")  # it is marked by a handler, which runs later
    assert tab.evaluate(chosen) == 1


def test_screen_readers_hear_of_every_stage(tab, files, made):
    tab.open(files["report"])
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    names = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"]
    ]
    links = [name for role, name in names if role == "link"]
    assert all(links), "a link without a name"
    for stage in made.facts.models[0].stages:
        assert any(name.startswith(f"Stage {stage.number}, {stage.name}:") for name in links)
        assert stage.name in links, "the table's"
    images = [name for role, name in names if role in ("image", "img")]
    assert len(images) == 6 and all(len(name) > 30 for name in images)
    tables = [name for role, name in names if role == "table"]
    assert any("Every stage" in name for name in tables)


def test_loops_are_nested_lists_and_a_cell_of_the_heat_map_opens_its_stage(tab, files, made):
    last = len(made.facts.models[0].stages) - 1
    tab.open(files["report"])
    cell = "[...document.querySelectorAll('#layers ~ .scroll svg a')]"
    assert tab.evaluate(f"{cell}.length") == 2 * (last + 1)
    tab.evaluate(f"{cell}.find(a => a.getAttribute('href') === '#stage-{last}').dispatchEvent("
                 "new MouseEvent('click', {bubbles: true, cancelable: true}))")
    tab.wait(f"{SHOWN}.join() === 'stage-{last}'")
    deepest = max(line.depth for line in made.facts.models[0].stages[last].loops)
    lists = " ".join(["ul.loops"] * (deepest + 1))
    assert tab.evaluate(f"document.querySelector('.stage:target {lists}') !== null")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    names = [node.get("name", {}).get("value", "") for node in nodes if not node["ignored"]]
    assert any(name.startswith("Heat map: what each") for name in names)
    assert any(name.startswith("What layers lose, as a table") for name in names)


def test_boxes_of_the_graph_do_not_overlap(tab, files):
    tab.open(files["report"])
    places = tab.evaluate(
        """[...document.querySelectorAll('.graph .frame, .graph .pill rect')].map(e => {
          const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; })"""
    )
    for n, one in enumerate(places):
        for other in places[n + 1 :]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1]
            assert apart or other[3] <= one[1], (one, other)
    # and their words stay inside
    outside = tab.evaluate(
        """[...document.querySelectorAll('.graph .box')].flatMap(box => {
          const frame = box.querySelector('.frame').getBoundingClientRect();
          return [...box.querySelectorAll('text')].filter(t => {
            const r = t.getBoundingClientRect();
            return r.left < frame.left || r.right > frame.right || r.bottom > frame.bottom;
          }).map(t => t.textContent); })"""
    )
    assert outside == []
