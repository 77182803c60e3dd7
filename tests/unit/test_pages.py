"""The checks of the built documentation find what is wrong with pages."""

import pages


def test_links_to_missing_files_and_anchors_are_found(tmp_path):
    (tmp_path / "guide").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="guide/a.html#begin"></a><a href="guide/"></a><a href="https://example.org/x"></a><h1 id="top"></h1>'
        '<a href="#top"></a><a href="#bottom"></a><a href="b.html"></a><img src="guide/logo.svg">'
    )
    (tmp_path / "guide" / "index.html").write_text('<a href="../index.html#top">')
    (tmp_path / "guide" / "a.html").write_text('<h1 id="begin"></h1><a href="../index.html?q=1#end"></a>')
    assert pages.broken_links(tmp_path) == [
        "guide/a.html: ../index.html?q=1#end leads nowhere",
        "index.html: #bottom leads nowhere",
        "index.html: b.html leads nowhere",
        "index.html: guide/logo.svg leads nowhere",
    ]


def test_what_a_browser_measured_becomes_a_line_for_each_fault():
    right = {"page": "index.html", "width": 390, "needs": 390, "formulas": 0, "flat": 0, "elsewhere": []}
    assert pages.problems_of([right]) == []
    assert pages.problems_of([right | {"needs": 400}]) == ["index.html at 390 pixels is 400 pixels wide"]
    assert pages.problems_of([right | {"page": pages.FORMULAS[0]}, right | {"formulas": 2, "flat": 1}]) == [
        f"{pages.FORMULAS[0]} at 390 pixels does not show its formulas",
        "index.html at 390 pixels does not show its formulas",
    ]
    assert pages.problems_of([right | {"elsewhere": ["https://example.org/x.js"]}]) == [
        "index.html at 390 pixels loads ['https://example.org/x.js']"
    ]
