"""The page: its structure, what it loads, its size; libraries with hostile names; GPUs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from gtco import cli
from gtco.quantization.report import Layer, QuantizationReport
from gtco.report import page as page_module
from gtco.report.charts import HEAT, errors, heat_steps, telling
from gtco.report.compiled import with_report
from gtco.report.difference import difference
from gtco.report.facts import Facts, Measurement, Timing
from gtco.report.gather import judged, notes_of
from gtco.report.page import MOST_BYTES, TEMPLATES, difference_page, page, unattributed, view
from gtco.report.text import count, error_text, middle, milliseconds, percent
from gtco.support.options import Quantization

VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}


class Parsed(HTMLParser):
    """The ids, links, tags and text of a page. Raises if its tags do not close each other."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.links: list[dict[str, str]] = []
        self.tags: Counter[str] = Counter()
        self.loads: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        known = {name: value or "" for name, value in attrs}
        assert len(known) == len(attrs), (tag, attrs)
        self.tags[tag] += 1
        if "id" in known:
            self.ids.append(known["id"])
        if tag == "a":
            self.links.append(known)
        for name in ("src", "srcset", "data", "poster", "action", "xlink:href", "href"):
            if name in known and not known[name].startswith("#"):
                self.loads.append(known[name])
        assert not any(name.startswith("on") for name in known), (tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def timed(facts: Facts) -> Facts:
    """The facts as if every stage took twice the predicted time."""
    models = []
    for model in facts.models:
        stages = tuple(
            replace(s, measured=Timing(s.predicted_seconds, 2 * s.predicted_seconds, 9e-3))
            for s in model.stages
        )
        total = sum(stage.measured.median for stage in stages)
        whole = Timing(total, total + 1e-3, total + 2e-3)
        found = Measurement(20, 1, whole, total, total, 1e-3)
        models.append(replace(model, stages=stages, measurement=found, unmeasured=""))
    return judged(replace(facts, models=tuple(models)), facts.machine)


def check(text: str) -> Parsed:
    """What holds for every page."""
    seen = Parsed(text)
    twice = [name for name, times in Counter(seen.ids).items() if times > 1]
    assert not twice
    assert not seen.loads, "a page loads nothing"
    outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<]*|url\((?!#)[^)]*\)|@import", text)
    assert {link for link in outside if "www.w3.org" not in link} == set()
    assert len(text.encode()) < MOST_BYTES
    missing = {link["href"] for link in seen.links} - {f"#{name}" for name in seen.ids}
    assert not missing, "links lead nowhere"
    return seen


def test_every_stage_is_reached_from_the_graph_the_charts_and_the_table(made):
    facts = with_report(timed(made.facts), made.report)
    seen = check(page(facts))
    (model,) = facts.models
    for stage in model.stages:
        to = [link for link in seen.links if link["href"] == f"#stage-{stage.number}"]
        boxes = [link for link in to if link.get("id") == f"box-{stage.number}"]
        assert len(boxes) == 1 and stage.name in boxes[0]["aria-label"]
        assert f"stage-{stage.number}" in seen.ids
        pictures = [link for link in to if link.get("tabindex") == "-1"]
        assert len(pictures) >= 2, "the strip and the roofline"
        plain = [link for link in to if link not in boxes and link not in pictures]
        assert plain, "the table"
        for op in stage.operators:
            assert op.kind in seen.text and op.node in seen.text
    words = "unattributed", "of the roofline", "99th percentile", "AVX", "Agrees with ONNX Runtime"
    for word in (*words, *(d["case"] for d in model.verification["differences"])):
        assert word in seen.text, word
    assert seen.tags["svg"] == 7 and seen.tags["table"] == 3 and seen.tags["h1"] == 1


def test_the_loops_of_every_stage_are_nested_lists(made):
    facts = timed(made.facts)
    seen = check(page(facts))
    (model,) = facts.models
    for stage in model.stages:
        assert stage.loops and stage.loops[0].code in seen.text
        for line in stage.loops:
            said = line.code if line.extent is None else line.text
            assert " ".join(said.split()) in seen.text
    assert "The product's nest" in seen.text and "The program's loops" in seen.text
    inner = sum(
        line.depth > before.depth
        for stage in model.stages
        for before, line in pairwise(stage.loops)
    )
    text = page(facts)
    assert text.count('<ul class="loops">') == inner + len(model.stages)
    older = replace(model, stages=tuple(replace(s, loops=()) for s in model.stages))
    assert "made by an older gtco" in check(page(replace(facts, models=(older,)))).text


def test_what_layers_lose_is_a_heat_map_and_a_table(made):
    facts = with_report(timed(made.facts), made.report)
    seen = check(page(facts))
    losses = facts.models[0].losses
    assert [layer["stage"] for layer in losses["layers"]] == [
        stage.number for stage in facts.models[0].stages
    ]
    worst = max(error for layer in losses["layers"] for error in layer["errors"])
    assert worst < 1e-6, "float32"
    words = "by the stage alone", "standard normal inputs", "error, at most"
    for text in (error_text(worst), *words):
        assert text in seen.text, text
    assert "--verify-layers" in check(page(timed(made.facts))).text


def test_the_peak_is_that_of_the_format_that_multiplies(made, narrow):
    assert "of the float32 peak" in check(page(timed(made.facts))).text
    seen = check(page(timed(narrow.facts)))
    assert "of the bfloat16 peak" in seen.text and "float32 peak" not in seen.text


def test_a_busy_machine_is_named_at_the_top(made):
    facts = timed(made.facts)
    (model,) = facts.models
    found = model.measurement
    assert "Measure again" not in check(page(facts)).text
    whole = found.end_to_end.median
    busy = replace(found, summed_seconds=found.stages_seconds + 0.2 * whole)
    shown = replace(facts, models=(replace(model, measurement=busy),))
    seen = check(page(shown))
    assert f"took about {milliseconds(0.2 * whole)} of a run's {milliseconds(whole)}" in seen.text


def test_a_slow_stage_is_one_whose_least_time_is_long(made):
    (model,) = made.facts.models
    seconds = max(stage.predicted_seconds for stage in model.stages)
    slow = replace(model.stages[0], predicted_seconds=max(seconds, 1e-4))
    least, busy = (
        replace(slow, measured=Timing(least * slow.predicted_seconds, 9.0, 9.0))
        for least in (3.0, 1.0)
    )
    assert notes_of(least, ()) == ("It takes at least 3.0 times as long as predicted.",)
    assert notes_of(busy, ()) == ()


def test_tables_name_the_operators_that_compute(made):
    facts = timed(made.facts)
    rows = re.findall(r"<tr><td class=\"n\">\d+</td>.*?</tr>", page(facts))
    stages = facts.models[0].stages
    assert len(rows) == len(stages)
    for row, stage in zip(rows, stages, strict=True):
        assert f"<td>{middle('+'.join(telling(stage)), 34)}</td>" in row
    moving = [s for s in stages if len(telling(s)) < len(s.operators)]
    assert moving, "a stage moves elements before it computes"


def test_the_left_edge_of_the_errors_is_explained_where_something_is_there(made):
    facts = with_report(timed(made.facts), made.report)
    found = facts.models[0].verification
    for least, said in ((1e-7, False), (0.0, True)):
        rows = [{**d, "relative": least} for d in found["differences"]]
        chart = errors({**found, "differences": rows})
        title = chart["layer"][0]["encoding"]["x"]["title"]
        assert ("at the left edge" in title) == said and "largest relative error" in title


def test_losses_of_a_quantized_model(made, monkeypatch):
    """Of a product whose node a stage has, of one that has none, and of one in float."""
    named = made.facts.models[0].stages[-1].operators[-1].node
    products = [("head", named, 0.02, 0.01, ""), ("gone", "gone", 1e-4, None, "")]
    rows = [
        Layer(label, node, "MatMul", 1, alone, reads, why)
        for label, node, alone, reads, why in (*products, ("first", "f", None, None, "excluded"))
    ]
    found = QuantizationReport(Quantization(), 24, 8, "mse", 0.0, [], rows, [], {})
    facts = with_report(made.facts, replace(made.report, losses=None, quantization=found))
    losses = facts.models[0].losses
    last = len(facts.models[0].stages) - 1
    assert [(layer["name"], layer["stage"]) for layer in losses["layers"]] == [
        ("head", last),
        ("gone", None),
    ]
    seen = check(page(facts))
    for text in ("1 product left in float", "not known", "0.01 %", "products in the order"):
        assert text in seen.text, text
    assert view(facts, facts.models[0], "").lost[last][0][1] == "2 %"


def test_colours_of_a_heat_map():
    assert heat_steps([1e-3] * 8)[-1] == 1e-3
    wide = heat_steps([1e-9, 1e-3, 2e-3, 4e-3, 8e-3])
    assert len(wide) == HEAT and wide[-1] == 8e-3 and 0.9e-3 < wide[0] < 1.1e-3
    assert heat_steps([])[-1] == 1.0
    assert all(1.2 < b / a < 3.1 for a, b in pairwise(wide))
    assert error_text(0.0021) == "0.21 %" and error_text(None) == "not known"
    assert error_text(0.994) == "99 %" and error_text(0.996) == "100 %"
    assert error_text(1.28) == "128 %"


def test_the_same_facts_are_the_same_page(made):
    facts = with_report(timed(made.facts), made.report)
    assert page(facts) == page(facts)
    assert page(made.facts) != page(facts)


def test_a_page_without_measurements_says_so(made):
    seen = check(page(made.facts))
    assert "Not measured. Times below are predicted" in seen.text
    assert "unattributed" not in seen.text


def test_names_of_a_model_cannot_break_out(made):
    evil = "<img src=x onerror=alert(1)>\"'</script></svg>&amp;"
    (model,) = made.facts.models
    stages = tuple(
        replace(
            stage,
            name=evil,
            operators=tuple(replace(op, node=evil) for op in stage.operators),
            output=replace(stage.output, name=evil),
            inputs=tuple(replace(t, name=evil) for t in stage.inputs),
        )
        for stage in model.stages
    )
    facts = replace(
        made.facts, name=evil, file=evil, notes=(evil,), models=(replace(model, stages=stages),)
    )
    seen = check(page(timed(facts)))
    assert seen.tags["img"] == 0 and seen.tags["script"] == 1
    assert evil in "".join(seen.texts)
    assert check(difference_page(difference(facts, timed(facts)))).tags["img"] == 0


def test_a_large_model_stays_below_the_size_that_mail_takes(made):
    """Six hundred stages in a row, with long names."""
    (model,) = made.facts.models
    long = "model.encoder.layers.11.self_attention.query_key_value.projection." * 2
    count = len(model.stages)
    stages = []
    for number in range(600):
        of = model.stages[number % count]
        before = (number - 1,) if number else ()
        inputs = [replace(t, name=long, stage=None, place="weight") for t in of.inputs]
        if number:
            inputs[0] = replace(inputs[0], stage=number - 1, place="stage")
        stages.append(
            replace(
                of,
                number=number,
                name=f"{long}{number}",
                operators=tuple(replace(op, node=long) for op in of.operators),
                inputs=tuple(inputs),
                output=replace(of.output, stage=number, place="stage"),
                read_by=(number + 1,) if number < 599 else (),
            )
        )
        assert stages[-1].reads == before
    large = replace(model, stages=tuple(stages), arena=())
    check(page(timed(replace(made.facts, models=(large,)))))


def test_copies_are_named_where_a_gpu_has_some(made):
    facts = timed(made.facts)
    assert "and the waits" in check(page(facts)).text and "copies" not in check(page(facts)).text
    (model,) = facts.models
    assert "copies of inputs and outputs from and to the host" in unattributed(model, "cuda:sm_80")


def test_every_variant_has_its_own_ids(shaped):
    seen = check(page(timed(shaped.facts)))
    assert "batch=1" in seen.text and "batch=3" in seen.text
    for model, prefix in zip(shaped.facts.models, ("", "v1-"), strict=True):
        for stage in model.stages:
            assert f"{prefix}stage-{stage.number}" in seen.ids
    many = replace(shaped.facts, models=shaped.facts.models * 3)
    assert "The library has 3 more variants" in check(page(many)).text


def test_the_command_writes_the_page(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(made.library), "--no-run"]) == 0
    assert "block.html" in capsys.readouterr().out
    assert (tmp_path / "block.html").read_text() == page(made.facts)
    for again in ("", "--json -o j.json", "--json -o j.json"):  # over its own
        assert cli.main(["report", str(made.library), "--no-run", *again.split()]) == 0
    with pytest.raises(SystemExit):
        cli.main(["report", str(made.library), "--no-run", "-o", "gone/x.html"])
    assert "the folder 'gone' does not exist" in capsys.readouterr().err
    assert cli.main(["report", str(made.library), "--no-run", "-o", "y.html", "--dim", "a=1"]) == 1


def test_without_the_extra_the_error_names_it_and_json_works(made, monkeypatch, capsys):
    monkeypatch.setattr(page_module, "find_spec", lambda name: None)
    for command in (["report", str(made.library)], ["compile", "m.onnx", "--report", "r.html"]):
        assert cli.main(command) == 1
        said = capsys.readouterr().err
        assert "pip install 'gtco[report]'" in said and "vl-convert-python" in said
    assert cli.main(["report", str(made.library), "--json", "--no-run"]) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_its_paper(scheme):
    """WCAG's contrast of 4.5 for text, 3 for the colours of families."""
    style = (TEMPLATES / "style.css").read_text()
    blocks = re.findall(r":root \{([^}]*)\}", style)
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", blocks[scheme == "dark"]))
    for paper in ("paper", "panel"):
        for ink in ("ink", "muted", "link"):
            assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    assert contrast(colours["ink"], colours["note"]) >= 4.5
    for family in ("products", "convolutions", "normalisation", "fallback", "elementwise"):
        assert contrast(colours[family], colours["paper"]) >= 3, family


def contrast(one: str, other: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio"""

    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_numbers_and_names():
    assert [milliseconds(s) for s in (None, 1.5, 0.1234, 0.01234, 1.234e-4, 1.2e-6)] == [
        *("\N{EN DASH}", "1,500 ms", "123.4 ms", "12.34 ms", "0.123 ms", "0.0012 ms")
    ]
    assert [percent(x) for x in (None, 0.5, 0.0995, 0.0123, 0.0001, 1.2)] == [
        *("\N{EN DASH}", "50%", "10%", "1.2%", "<0.1%", "120%")
    ]
    assert (
        count(1.5e6, "B") == "1.5 MB" and count(12, "B") == "12 B" and count(999e9, "F") == "999 GF"
    )
    assert middle("abcdefghij", 7) == "abc…hij" and middle("abc", 3) == "abc"
