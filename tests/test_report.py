from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread

from numba_glocal.report import IterationSummary, ReportData, WorkerSummary, render_report, summarise, write_report
from numba_glocal.sampling import uniform_rotations
from numba_glocal.values import FSCCurve, Volume


def curve(corrected, mask="ball of 200 A"):
    values = np.asarray(corrected, float)
    return FSCCurve(20, 8.0, values * 0.9, values, values * 0.2, values, mask, 3)


FALLING = [1, 1, 0.99, 0.9, 0.7, 0.4, 0.2, 0.1, 0.05, 0.0, 0.02]


def full():
    rng = np.random.default_rng(1)
    volumes = [Volume(rng.normal(size=(20,) * 3).astype(np.float32), 8.0) for _ in range(4)]
    return ReportData(
        title="run <1>",
        subtitle="particles & poses",
        particle_count=50,
        half_counts=(26, 24),
        fsc=curve(FALLING),
        half1=volumes[0],
        half2=volumes[1],
        average=volumes[2],
        filtered=volumes[3],
        iterations=[IterationSummary(1, 40.0, 6.0), IterationSummary(2, 26.7, 3.0, seconds=75.0)],
        scores=rng.normal(size=50),
        score_name="flcf",
        angle_changes_deg=np.full(50, 4.0),
        shift_changes_angst=np.full(50, 7.5),
        rotations=uniform_rotations(50),
        workers=[WorkerSummary("worker 0", "CPU", 30, 1.5)],
        bad_particles=[("sub/p<7>.mrc", "holds NaN")],
        converged=True,
        wall_seconds=80.0,
        settings={"particle-diameter": 280.0, "mask": None, "gpus": ("0", "1"), "normalise": True},
        provenance={"command": "numba-glocal align x.star -o run"},
        files={"half1.mrc": "unfiltered half-map"},
    )


def test_hand_is_said():
    """What --check-hand found stands in the summary where it is right, and as a warning where it is not; without the option nothing does."""
    right, wrong = "hand: the particles have the hand of the start map: ..", "hand: not told at this low-pass: .."
    data = replace(full(), hand=[(right, True), (wrong, False)])
    assert "Hand: the particles have the hand of the start map: ..." in summarise(data) and "not told" not in summarise(data)
    warned = re.findall(r'<p class="warn">([^<]*)', render_report(data))
    assert warned == ["Hand: not told at this low-pass: .."]
    assert "and:" not in summarise(full())


class Page(HTMLParser):
    """Tags that stay open, addresses that are fetched, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text.append(text)


def test_page_is_whole_self_contained_and_shows_everything(tmp_path):
    path = write_report(tmp_path, full())
    assert path == tmp_path / "report.html" and [p.name for p in tmp_path.iterdir()] == ["report.html"]
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == []
    assert len(page.addresses) == 7 and all(a.startswith("data:image/png;base64,") for a in page.addresses)
    assert not re.search(r"https?://|<script|@import|url\(", html)
    for address in page.addresses:
        picture = imread(io.BytesIO(base64.b64decode(address.split(",")[1])))
        assert picture.shape[0] > 200 and picture.std() > 0.02  # a picture with something in it
    text = " ".join(" ".join(page.text).split())
    # shell 6 of 20 voxels of 8 Angstrom: 26.7 Angstrom
    for expected in (
        "run <1>",
        "particles & poses",
        "26.7 \u00c5",
        "26 and 24",
        "sub/p<7>.mrc",
        "holds NaN",
        "worker 0",
        "20.0",
        "280",
        "0, 1",
        "1 min 20 s",
    ):
        assert expected in text, expected
    assert "ball of 200 A" in text and "numba-glocal align x.star" in text
    assert "p<7>" not in html  # escaped


def test_missing_parts_are_left_out(tmp_path):
    html = write_report(tmp_path, ReportData("bare")).read_text(encoding="utf-8")
    assert Page(html).open == []
    for absent in ("<img", "Resolution</h2>", "Maps", "Throughput", "Settings", "Provenance", "Skipped", "Iterations", "Particles", "Files"):
        assert absent not in html, absent


def test_summary_says_what_happened():
    text = summarise(full())
    assert "26.7 \u00c5 (FSC 0.143, half-maps under the mask, corrected" in text
    assert "50 particles, 26 and 24" in text and "2 iterations were run, after which the poses no longer moved" in text
    assert "turned by more than 4 degrees and half moved by more than 7.5 \u00c5" in text and "1 particle was skipped" in text


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0] * 11, "16 \u00c5 (Nyquist)"), ([1, 0.05] + [0.0] * 9, "do not agree")],
)
def test_summary_of_unusual_curves(values, expected):
    assert expected in summarise(ReportData("x", fsc=curve(values)))


def test_a_curve_that_rises_again_is_pointed_out():
    values = [1, 1, 0.9, 0.1, 0.05, 0.5, 0.2, 0.0, 0.0, 0.0, 0.0]
    assert "rises above 0.143 again" in render_report(ReportData("x", fsc=curve(values)))
    assert "again" not in render_report(ReportData("x", fsc=curve(FALLING)))


def test_warnings_begin_as_sentences_do():
    lines = ["half-sets: some", "the resolution is coarse", "start.star: no angles", "--subset 9: few", "Kept"]
    shown = re.findall(r'<p class="warn">(.*?)</p>', render_report(ReportData("x", warnings=lines)))
    assert shown == ["Half-sets: some", "The resolution is coarse", "start.star: no angles", "--subset 9: few", "Kept"]


def test_a_resumed_run_says_so():
    page = render_report(ReportData("x", wall_seconds=80.0, resumed=2))
    assert "in all, resumed 2 times" in page and "The run was resumed 2 times" in page
    assert "resumed" not in render_report(ReportData("x", wall_seconds=80.0))


def test_odd_values_do_not_break_the_page():
    """Scores that are NaN, a flat map, no pixel size, iterations without a resolution."""
    data = ReportData(
        "odd",
        average=Volume(np.zeros((8,) * 3, np.float32), float("nan")),
        scores=np.array([np.nan, 1.0, np.nan]),
        angle_changes_deg=np.zeros(3),
        shift_changes_angst=np.full(3, np.nan),
        rotations=np.eye(3)[None],
        iterations=[IterationSummary(1, float("inf"), None)],
        fsc=curve([1, np.nan] + [0.0] * 9, mask="none"),
    )
    assert Page(render_report(data)).open == []


def test_long_lists_of_bad_particles_are_cut():
    html = render_report(ReportData("x", bad_particles=[(f"p{i}.mrc", "constant") for i in range(130)]))
    assert html.count("constant") == 50 and "and 80 more" in html and "130 particles were left out" in html


def test_noise_of_groups_is_a_table_and_of_many_a_range():
    rows = [[1.0, 0.02, 0.9, 1.2], [0.75, 0.02, 1.1, 0.8]]
    page = render_report(ReportData("run", noise={"1": rows, "2": rows[::-1]}, noise_groups=("thick", "thin")))
    assert "<h2>Noise</h2>" in page
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index("<h2>Noise</h2>") :])
    assert cells[:14] == [
        "thick",
        "1 (0.02)",
        "0.9",
        "1.2",
        "0.75 (0.02)",
        "1.1",
        "0.8",
        "thin",
        "0.75 (0.02)",
        "1.1",
        "0.8",
        "1 (0.02)",
        "0.9",
        "1.2",
    ]
    many = ReportData("run", noise={"1": rows * 10, "2": rows * 10}, noise_groups=tuple("abcdefghijklmnopqrst"))
    assert "<td>all 20</td>" in render_report(many) and "0.9 to 1.1" in render_report(many)
    assert "<h2>Noise</h2>" not in render_report(ReportData("run", noise={"1": rows[:1], "2": rows[:1]}, noise_groups=("all",)))
