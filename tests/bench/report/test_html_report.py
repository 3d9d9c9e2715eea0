"""The report: one file that loads nothing, runs nothing of a server's, and draws what was measured."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.bench.report.html_report import MOST_RESULTS, html, write_html
from headrace.bench.report.markup import Html, tag
from headrace.bench.report.plot import MOST_POINTS, SERIES, Axis, axis, spread_out, tail_axis, thin
from headrace.bench.results.benchmark_result import BenchmarkResult, RequestStats, read, write
from headrace.bench.results.formatting import clean, milliseconds, number, seconds
from headrace.bench.results.result_columns import columns, lanes, percentiles, rate, running, slice_width, slices
from headrace.errors import RequestError
from headrace.observe.web import web_text
from tests.support.benchmark_results import measured, swept

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x' \u202egnp.exe\x00\x1b[2J"


class Page(HTMLParser):
    """What a browser would see; fails where an element is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.raw: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "input", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("style", "script"):
            self.raw[self._open[-1]] = self.raw.get(self._open[-1], "") + data
        else:
            self.texts.append(data)

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.elements)

    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?", text)]


# The page


def test_a_report_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    write_html(measured(objectives={"ttft": 300.0}), tmp_path / "report.html", machine="two cores")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object", "embed", "base", "form", "a"}
    for _, attributes in page.elements:
        assert not {"src", "href", "xlink:href", "style"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert "@import" not in page.raw["style"]
    assert "url(" not in page.raw["style"]
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|innerHTML|eval\(", page.raw["script"])
    assert "two cores" in page.text


def test_only_the_reports_own_script_and_style_may_run() -> None:
    page = Page(html(measured()))
    assert (page.count("script"), page.count("style")) == (1, 1)
    policy = next(attributes["content"] for _, attributes in page.elements if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none';")
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.raw[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_what_a_server_says_is_text() -> None:
    result = measured(failing=0.3, tenants=(HOSTILE, "b"), model=HOSTILE, label=HOSTILE, url=HOSTILE, workload=HOSTILE)
    for row in result.rows:
        row.error, row.why = (HOSTILE, HOSTILE) if not row.ok else ("", "")
    result.figures.errors = {HOSTILE: 30}
    result.warnings = [HOSTILE]
    result.arguments = {HOSTILE: HOSTILE, "body": {HOSTILE: 1}}
    result.stages[0].name = HOSTILE
    for text in (html(result, machine=HOSTILE), html([result, result])):
        page = Page(text)
        assert page.count("script") == 1
        assert page.count("img") == 0
        for name, attributes in page.elements:
            assert not [key for key in attributes if key.startswith("on")], name
        assert "<script>alert(1)" in page.text  # it is shown as it was sent
        assert not re.search("[\x00\x1b\u202e]", text)
        assert svgs(text)  # they are XML still


def test_every_chart_has_a_title_and_its_data_as_a_table() -> None:
    for text in (html(measured(failing=0.1)), html(swept()), html([measured(), measured(seed=1, label="theirs")])):
        page = Page(text)
        ids = page.ids()
        assert len(ids) == len(set(ids))
        drawn = svgs(text)
        assert len(drawn) > 7
        for drawing in drawn:
            assert drawing.get("role") == "img"
            assert drawing.get("aria-labelledby") in ids
        assert page.count("figure") == page.count("figcaption") == page.count("details") == len(drawn)
        for figure in re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL):
            assert "<td>" in figure


def test_figures_are_those_of_the_result() -> None:
    result = measured(objectives={"ttft": 300.0}, tenants=("red", "blue"), arguments={"concurrency": [4]})
    page = Page(html(result))
    total = result.figures
    assert total.ttft is not None
    assert total.itl is not None
    for wanted in (
        milliseconds(total.ttft.p50),
        milliseconds(total.ttft.p99),
        milliseconds(total.itl.p99),
        number(total.output_throughput),
        "ttft ≤ 300 ms",
        "red",
        "blue",
        "to 128 tokens",
        "--concurrency",
        "[4]",
        result.url,
    ):
        assert any(wanted in text for text in page.texts), wanted


def test_the_page_works_for_results_that_have_little_in_them() -> None:
    one = measured(requests=1)
    failed = measured(failing=1.0)
    bare = msgspec.structs.replace(measured(), rows=[])
    whole = measured(streamed=False)
    for row in whole.rows:
        row.ttft, row.gaps, row.chunks = None, [], 0
    empty = BenchmarkResult(figures=RequestStats(name="all"))
    same = measured(requests=5)
    for row in same.rows:
        row.ttft, row.e2el, row.gaps = 0.0, 0.0, [0.0]
    for result in (one, failed, bare, whole, empty, same):
        text = html(result)
        Page(text)
        svgs(text)
        assert "nan" not in re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL)
    assert "no rows of requests" in html(bare)
    Page(html([one, failed, bare, whole, empty, same]))


def test_a_result_read_from_a_file_gives_the_same_report(tmp_path: Path) -> None:
    result = measured()
    write(result, tmp_path / "result.json")
    assert html(read(tmp_path / "result.json")) == html(result)


def test_long_runs_make_no_long_reports() -> None:
    result = measured(requests=20_000, users=200, tokens=8, failing=0.02)
    text = html(result)
    assert len(text) < 900_000
    for drawing in svgs(text):
        for line in drawing.iter("polyline"):
            assert len((line.get("points") or "").split()) <= MOST_POINTS
    assert "of 20,000 requests" in text


# Several results


def test_each_of_several_results_has_one_colour_throughout() -> None:
    results = [
        measured(seed=seed, label=name, slower=1.0 + seed) for seed, name in enumerate(("ours", "llama", "vllm"))
    ]
    text = html(results)
    page = Page(text)
    assert [a["data-series"] for tag, a in page.elements if tag == "input"] == ["0", "1", "2"]
    for drawing in svgs(text):
        for line in drawing.iter("polyline"):
            place = ["ours", "llama", "vllm"].index(line.get("data-name") or "")
            assert f"s{place} r{place}" in (line.get("class") or "")
    assert page.text.count("Side by side") == 1


def test_results_of_the_same_name_are_told_apart() -> None:
    page = Page(html([measured(), measured(seed=1), measured(seed=2)]))
    labels = {text for text in page.texts if text.startswith("ours")}
    assert {"ours", "ours (2)", "ours (3)"} <= labels


def test_the_best_of_each_row_is_marked() -> None:
    text = html([measured(seed=1), measured(seed=1, slower=2.0, label="slow")])
    row = re.search(r'<tr><th scope="row">TTFT p50</th>(.*?)</tr>', text)
    assert row is not None
    assert re.fullmatch(r'<td><strong>[^<]*</strong></td><td>[^<]*<span class="times"> .2.00</span></td>', row[1])


def test_more_results_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(RequestError, match="1 to 16"):
        html([measured(requests=2)] * (MOST_RESULTS + 1))
    with pytest.raises(RequestError, match="1 to 16"):
        html([])
    Page(html([measured(requests=3)] * MOST_RESULTS))


# Sweeps


def test_a_sweep_shows_latency_against_load_with_its_knee() -> None:
    text = html(swept())
    page = Page(text)
    assert "knee: 4" in page.text
    assert "it fell behind" in page.text
    assert "At the knee, 4 requests/s:" in page.text
    load = next(drawing for drawing in svgs(text) if drawing.get("aria-labelledby") == "load-ttft")
    lines = [line for line in load.iter("polyline")]
    assert [line.get("data-name") for line in lines] == ["p50", "p99"]
    assert all(len((line.get("points") or "").split()) == 4 for line in lines)
    ticks = [each.text for each in load.iter("text") if each.get("text-anchor") == "middle"]
    assert ticks == ["1", "2", "4", "8"]


def test_sweeps_of_several_results_are_drawn_over_each_other() -> None:
    text = html([swept(), swept(seed=3, label="theirs", rates=(1.0, 2.0, 3.0))])
    load = next(drawing for drawing in svgs(text) if drawing.get("aria-labelledby") == "load-itl")
    assert [line.get("data-name") for line in load.iter("polyline")] == [
        "ours p50",
        "theirs p50",
        "ours p99",
        "theirs p99",
    ]


def test_a_run_of_one_load_has_no_chart_against_load() -> None:
    assert "against load" not in html(measured())


# Drawing


def test_axes_span_decades_only_where_values_do() -> None:
    assert axis([[100.0, 180.0]], title="", unit="ms").kind == "linear"
    assert axis([[100.0, 180.0]], title="", unit="ms").low == 0.0
    wide = axis([[3.0, 40_000.0]], title="", unit="ms")
    assert (wide.kind, wide.low, wide.high) == ("log", 2.0, 50_000.0)
    assert wide.ticks(5) == [10.0, 100.0, 1000.0, 10_000.0]


@pytest.mark.parametrize(
    ("found", "ticks"),
    [
        (Axis(high=100.0), [0, 20, 40, 60, 80, 100]),
        (Axis(high=0.9), [0, 0.2, 0.4, 0.6, 0.8]),
        (Axis(high=300.0, unit="s"), [0, 60, 120, 180, 240, 300]),
        (Axis(high=3.0, unit="count"), [0, 1, 2, 3]),
        (Axis(high=12.0, unit="count"), [0, 5, 10]),
        (Axis(kind="log", low=10.0, high=100.0), [10, 20, 50, 100]),
        (tail_axis(1000), [0, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999]),
    ],
)
def test_ticks_are_round(found: Axis, ticks: list[float]) -> None:
    assert found.ticks(6) == pytest.approx(ticks)


@pytest.mark.parametrize("found", [Axis(high=50.0), Axis(kind="log", low=0.5, high=2000.0), tail_axis(10_000)])
def test_places_and_values_undo_each_other(found: Axis) -> None:
    for place in (0.0, 0.25, 0.7, 1.0):
        assert float(found.place(found.value(place))) == pytest.approx(place)


def test_each_nine_has_the_same_width() -> None:
    places = tail_axis(10_000).place([0.0, 0.9, 0.99, 0.999])
    assert np.diff(places) == pytest.approx(np.full(3, 0.25))


def test_labels_are_pushed_apart_and_stay_inside() -> None:
    assert spread_out([10.0, 12.0, 50.0], 14.0, 0.0, 100.0) == [10.0, 24.0, 50.0]
    assert spread_out([95.0, 96.0, 97.0], 14.0, 0.0, 100.0) == [72.0, 86.0, 100.0]


def test_thinned_points_keep_both_ends() -> None:
    places = thin(100_000, 500)
    assert (places[0], places[-1], places.size) == (0, 99_999, 500)
    assert thin(3).tolist() == [0, 1, 2]


def test_everything_drawn_lies_inside_of_its_drawing() -> None:
    for text in (html(measured(failing=0.1, users=30)), html(swept()), html([measured(), swept()])):
        for drawing in svgs(text):
            _, _, width, height = numbers(drawing.get("viewBox") or "")
            for line in drawing.iter("polyline"):
                pairs = numbers(line.get("points") or "")
                assert min(pairs[::2]) >= 0.0
                assert max(pairs[::2]) <= width
                assert min(pairs[1::2]) >= 0.0
                assert max(pairs[1::2]) <= height
            for each in drawing.iter("text"):
                assert 0.0 <= float(each.get("x") or 0.0) <= width
                assert 0.0 <= float(each.get("y") or 0.0) <= height


def test_the_page_tells_the_script_where_values_are() -> None:
    drawing = next(each for each in svgs(html(measured())) if each.get("aria-labelledby") == "percentiles-ttft")
    plot = json.loads(drawing.get("data-plot") or "")
    across, down = Axis(**plot["x"]), Axis(**plot["y"])
    left, top, width, height = plot["box"]
    line = next(drawing.iter("polyline"))
    first = numbers((line.get("points") or "").split()[0])
    result = measured()
    assert across.value((first[0] - left) / width) == pytest.approx(0.0, abs=1e-6)
    least = min(row.ttft for row in result.rows if row.ttft is not None)
    assert down.value(1.0 - (first[1] - top) / height) == pytest.approx(1e3 * least, rel=0.01)


def test_attributes_and_texts_are_escaped_by_how_they_are_built() -> None:
    assert tag("p", "<b>", Html("<i></i>"), class_='"x"', data_y=1.25) == (
        '<p class="&quot;x&quot;" data-y="1.25">&lt;b&gt;<i></i></p>'
    )
    assert clean("a\x00b" + "c" * 5000, 10) == "a\N{REPLACEMENT CHARACTER}bcccccc…"


def test_numbers_are_written_with_three_digits_and_their_unit() -> None:
    assert [milliseconds(value) for value in (0.0, 0.0123, 0.9996, 12.345, 999.4, 1234.5, None)] == [
        *("0 ms", "12.3 µs", "1.00 ms", "12.3 ms", "999 ms", "1.23 s", "-"),
    ]
    assert [number(value) for value in (3.0, 12.345, 1234.5, float("nan"))] == ["3", "12.3", "1,234", "-"]
    assert [seconds(value) for value in (1.5, 90.0, 125.0, 7200.0)] == ["1.50 s", "90.0 s", "2 min 5 s", "2 h 0 min"]


# What is drawn


def test_columns_count_what_the_figures_count() -> None:
    result = measured(failing=0.2, objectives={"ttft": 250.0})
    found = columns(result)
    total = result.figures
    assert total.ttft is not None
    assert total.itl is not None
    assert float(np.percentile(found.latency("ttft"), 99)) == pytest.approx(total.ttft.p99)
    assert float(np.percentile(found.latency("itl"), 50)) == pytest.approx(total.itl.p50)
    assert int(found.ok.sum()) == total.completed
    assert int(found.good.sum()) == total.good
    assert float(found.output_tokens.sum()) == pytest.approx(total.output_tokens)


def test_time_lines_hold_every_request_and_every_token() -> None:
    found = columns(measured(users=6))
    edges = slices(found.seconds, slice_width(found.seconds))
    width = np.diff(edges)
    busy = float((running(found.start, found.end, edges) * width).sum())
    assert busy == pytest.approx(float((found.end - found.start).sum()))
    tokens = float((rate(found.output_at, found.output_tokens, edges) * width).sum())
    assert tokens == pytest.approx(float(found.output_tokens.sum()))
    assert running(found.start, found.end, edges).max() <= 6.0 + 1e-9


def test_a_curve_of_percentiles_goes_through_the_percentiles() -> None:
    values = np.exp(np.random.default_rng(1).standard_normal(5000))
    shares, ys = percentiles(values)
    assert shares[0] == 0.0
    assert ys[0] == values.min()
    assert float(np.interp(0.99, shares, ys)) == pytest.approx(float(np.percentile(values, 99)), rel=0.01)
    assert (np.diff(ys) >= 0.0).all()


def test_requests_of_a_lane_do_not_overlap() -> None:
    found = columns(measured(users=5, requests=200))
    order = np.argsort(found.start, kind="stable")
    start, end = found.start[order], found.end[order]
    lane = lanes(start, end)
    assert int(lane.max()) == 4
    for number_ in range(5):
        mine = lane == number_
        assert (start[mine][1:] >= end[mine][:-1]).all()


def test_outputs_whose_gaps_were_left_out_are_spread_over_the_answer() -> None:
    result = measured(requests=3)
    for row in result.rows:
        row.gaps = []
    found = columns(result)
    assert found.gaps.size == 0
    assert float(found.output_tokens.sum()) == 48.0
    assert found.output_at.max() == pytest.approx(float(found.end.max()))


# Colours


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[place : place + 2], 16) / 255.0 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    lms = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return lab @ np.cbrt(lms @ np.clip(rgb, 0.0, 1.0))


# Machado, Oliveira and Fernandes (2009), severity 1.0; the first is ordinary sight.
SIGHTS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def palettes() -> dict[str, dict[str, str]]:
    style = web_text("base.css")
    blocks = {"light": style.index(":root {"), "dark": style.index(':root[data-theme="dark"]')}
    return {
        name: dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", style[begin : style.index("}", begin)]))
        for name, begin in blocks.items()
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_series_can_be_told_apart_by_colour_blind_readers_and_from_the_page(theme: str) -> None:
    palette = palettes()[theme]
    colours = [palette[f"c{place}"] for place in range(SERIES)]
    weights = np.array([0.2126, 0.7152, 0.0722])
    paper = float(weights @ linear(palette["card"]))
    for each in colours:
        light = float(weights @ linear(each))
        assert (max(light, paper) + 0.05) / (min(light, paper) + 0.05) >= 3.0, each
    for sight, matrix in SIGHTS.items():
        seen = [oklab(matrix @ linear(each)) for each in colours]
        for first in range(SERIES):
            for second in range(first):
                apart = float(np.linalg.norm(seen[first] - seen[second]))
                least = 0.1 if first < 4 else 0.08  # the figures' own, and those of the first four results
                assert apart >= least, (sight, colours[first], colours[second], apart)


def test_both_dark_palettes_are_the_same() -> None:
    style = web_text("base.css")
    found = [re.sub(r"\s+", " ", block) for block in re.findall(r"color-scheme: dark;(.*?)}", style, flags=re.DOTALL)]
    assert len(found) == 2
    assert found[0] == found[1]
