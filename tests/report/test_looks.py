"""How pages stay readable: tables that no screen cuts off, pictures for light and dark screens."""

import base64
import re
from html.parser import HTMLParser

import pytest

from expunge.report import dark as dark_module
from expunge.report.dark import dark, in_dark
from expunge.report.page import render_report
from expunge.report.palette import _METHODS, BAND, FAINT, INK
from expunge.report.pieces import MOST_COLUMNS, HtmlLine, html_table
from expunge.report.stylesheet import STYLE
from report.bench_cases import bench


class Tables(HTMLParser):
    """Every table: what it stands in, its headers, and its cells by line."""

    def __init__(self, page):
        super().__init__()
        self.open, self.found, self.heading = [], [], None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "table":
            self.found.append({"in": list(self.open), "headers": [], "lines": []})
        elif tag == "th" and given.get("scope") == "col":
            self.heading = ""
        elif tag == "th" and given.get("scope") == "row":
            self.found[-1]["lines"].append([])
        elif tag == "td":
            self.found[-1]["lines"][-1].append(given.get("data-label"))
        if tag not in ("meta", "img", "source"):
            self.open.append(given.get("class") or "")

    def handle_endtag(self, tag):
        self.open.pop()
        if tag == "th" and self.heading is not None:
            self.found[-1]["headers"].append(self.heading)
            self.heading = None

    def handle_data(self, data):
        if self.heading is not None:
            self.heading += data


def test_every_table_scrolls_and_every_cell_knows_its_header(results):
    for page in (render_report(results), render_report(bench())):
        tables = Tables(page).found
        assert len(tables) >= 2
        for table in tables:
            assert any("wide" in around.split() for around in table["in"])
            assert len(table["lines"]) > 1
            assert all(labels == table["headers"][1:] for labels in table["lines"])


def blocks(media):
    """What the stylesheet says inside of the media queries for this."""
    return "".join(re.findall(rf"@media \({media}\) \{{(.*?\}}) \}}", STYLE, re.DOTALL))


def test_nothing_is_wider_than_a_phone_but_what_scrolls():
    scrolling = re.search(r"^([^{}\n]*) \{ overflow-x: auto", STYLE, re.MULTILINE)[1].split(", ")
    assert scrolling == [".wide", ".picture"]
    fixed = re.findall(r"([^{};]*)\{[^{}]*\b(?:min-width|(?<!-)width): (\d+)px", STYLE)
    assert [(selector.strip(), width) for selector, width in fixed] == [(".picture img", "620")]
    on_phones = blocks("max-width: 900px")
    assert re.search(r"\.wide tr\b[^{]*\{ display: block; \}", on_phones)
    assert "content: attr(data-label)" in on_phones
    assert ".wide thead { display: none; }" in on_phones


def test_a_wide_table_says_that_it_scrolls():
    for count, said in ((MOST_COLUMNS, False), (MOST_COLUMNS + 1, True)):
        headers = [f"column {number}" for number in range(count)]
        text = html_table(headers, [HtmlLine("line", ["1"] * (count - 1))])
        assert ("scroll it sideways" in text) is said
        assert 'tabindex="0"' in text  # so that a keyboard can scroll it


def pictures(page):
    found = re.findall(r"<picture>(.*?)</picture>", page, re.DOTALL)
    assert page.count("<img") == len(found) > 0
    for picture in found:
        (night,) = re.findall(r'<source media="\(prefers-color-scheme: dark\)" srcset="data:[^,]*,([^"]*)">', picture)
        (light,) = re.findall(r'<img alt="[^"]+" src="data:[^,]*,([^"]*)">', picture)
        yield tuple(base64.b64decode(source).decode() for source in (light, night))


def test_every_picture_is_there_for_light_and_for_dark_screens(results):
    for light, night in pictures(render_report(results)):
        assert INK in light
        assert INK not in night
        assert dark_module.INK in night
        assert "#ffffff" not in night
        assert light.count("<path") == night.count("<path")
        colours = re.compile(r": #[0-9a-f]{6}")
        assert colours.sub("", light) == colours.sub("", night)


def test_no_picture_has_paper_of_its_own(results):
    for light, _ in pictures(render_report(results)):
        (background,) = re.findall(r'<g id="patch_1">\s*<path d="[^"]*" style="([^"]*)"', light)
        assert background == "fill: none"


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("colour", sorted({colour for colour, _ in _METHODS.values()} | {BAND, "#b3261e", "#00694d"}))
def test_marks_stand_out_from_a_dark_card(colour):
    assert contrast(dark(colour.lower()), dark_module.CARD) >= 3


def test_text_stands_out_from_a_dark_card():
    assert dark(INK) == dark_module.INK
    assert contrast(dark(INK), dark_module.CARD) >= 7
    assert contrast(dark(FAINT), dark_module.CARD) >= 4.5
    assert contrast(dark("#ececec"), dark_module.CARD) < 1.5  # a grid stays faint


def test_methods_stay_told_apart_in_the_dark():
    own = {colour for colour, _ in _METHODS.values()}
    assert len({dark(colour.lower()) for colour in own}) == len(own)


def test_only_colours_are_changed():
    names = '<use xlink:href="#aabbcc"/><g clip-path="url(#abcdef)" id="#ffffff">'
    assert in_dark(names) == names


def test_the_page_knows_both_schemes():
    assert "--card: #ffffff" in STYLE
    assert f"--card: {dark_module.CARD}" in STYLE.partition("prefers-color-scheme: dark")[2]
    assert f"--ink: {dark_module.INK}" in STYLE.partition("prefers-color-scheme: dark")[2]
