"""The page of a report: what it says equals what summary, suggest and a trace say; and it loads nothing."""

import copy
import re
import shutil
import subprocess
import warnings
from html import escape

import pytest
import torch
from torch import nn

import distdl
from distdl.__main__ import main
from distdl.globals.summary.results import in_bytes
from distdl.reporting.circle import circle
from distdl.reporting.page import page
from distdl.tracing.reading import read


class Odd(nn.Module):
    def forward(self, x):
        return torch.alias_copy(x)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), nn.Conv2d(4, 2, 3, padding=1), Odd()
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    found = distdl.report(network(), (1, 1, 2, 2), (1, 1, 16, 12), path)
    return found.contents, path.read_text(encoding="utf-8"), path


def test_the_tree_has_every_module_with_its_shape(made):
    _, text, _ = made
    paths = re.findall(r'data-path="([^"]*)"', text)
    assert paths == [*dict(network().named_modules()), "(gradients of weights)"]
    assert text.count("<b>1x4x16x12</b>") == 4 and "<use href=" in text
    assert set(re.findall(r'href="#([\w-]+)"', text)) == set(re.findall(r'symbol id="([\w-]+)"', text))


def test_bars_are_what_summary_says(tmp_path):
    contents = distdl.report(network()[:3], (1, 1, 2, 2), (1, 1, 16, 12), tmp_path / "page.html", splits=False).contents
    text = page(contents)
    told = [distdl.summary(network()[:3], (1, 1, 2, 2), (1, 1, 16, 12), worker=worker) for worker in range(4)]
    bars = list(map(int, re.findall(r'data-bytes="(\d+)"', text)))
    assert bars == [told[0].sequential.peak, *(one.totals.peak for one in told)]
    assert contents.totals == {one.worker: one.totals for one in told}
    widths = list(map(float, re.findall(r"style=\"width:([\d.]+)%", text)))
    assert widths == [pytest.approx(100 * one / max(bars), abs=0.01) for one in bars]


def test_arrows_have_the_bytes_that_are_sent(made):
    contents, text, _ = made
    for worker, totals in contents.totals.items():
        sent = sum(nbytes for (source, _), nbytes in contents.sends.items() if source == worker)
        assert sent == totals.forward[1] + totals.backward[1]
    (panel,) = circle(list(contents.totals), contents.sends).panels
    assert {(one.source, one.target) for one in panel.arrows} == set(contents.sends)
    assert len(panel.arrows) == 12
    assert all(f"<title>{escape(one.title)}</title>" in text for one in panel.arrows)
    for (source, target), nbytes in contents.sends.items():
        assert f"<td>{source}</td><td>{target}</td><td>{in_bytes(nbytes)}</td>" in text


def test_a_fallback_has_its_reason_and_splits_are_ranked(made):
    _, text, _ = made
    assert "alias_copy: distdl has no op for it, so one worker runs it on " in text
    section = text.partition('id="splits"')[2]
    grids = [str(one.grid) for one in distdl.suggest(network(), 4, (1, 1, 16, 12))]
    listed = [
        f"({', '.join(grid.split('x'))})" for grid in re.findall(r"<tr(?: class=\"here\")?><td>([\dx]+)<", section)
    ]
    assert listed == grids and section.count('class="here"') == 1


def test_it_loads_nothing(made):
    _, text, _ = made
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(link.startswith(("#layout-", "data:,")) for link in links)
    assert "url(http" not in text and "@import" not in text and "fetch(" not in text
    assert "prefers-color-scheme:dark" in text


def test_names_are_escaped(tmp_path):
    kind = type("<b>&", (nn.Linear,), {})
    found = distdl.report(kind(4, 4), (2, 1), (4, 4), tmp_path / "page.html", splits=False)
    text = page(found.contents)
    assert "<b>&amp;" not in text and "&lt;b&gt;&amp;" in text and "Other splits" not in text
    assert text == (tmp_path / "page.html").read_text() and "&lt;b&gt;" in found._repr_html_()


def test_measured_times_stand_beside_predicted_bytes(tmp_path):
    plain = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))

    def work():
        model = distdl.distribute(copy.deepcopy(plain), (1, 1, 2, 1))
        x = distdl.distribute_tensor(torch.ones(1, 1, 16, 12), (1, 1, 2, 1))
        model(x).square().mean().backward()
        with distdl.trace(tmp_path / "step.json.gz", model) as found:
            model(x).square().mean().backward()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = distdl.run_workers(work, 2)[0]
    logs = read(tmp_path / "step.json.gz")
    assert [len(log.slices) for log in logs] == [len(log.slices) for log in trace.logs]
    for given in (tmp_path / "step.json.gz", trace):
        path = tmp_path / "page.html"
        contents = distdl.report(plain, (1, 1, 2, 1), (1, 1, 16, 12), path, given, splits=False).contents
        conv = contents.root.children[0]
        assert conv.computed > 0 and conv.sent >= sum(conv.row.sends.values()) > 0
        assert len(contents.measured) == 2 and contents.carried[0, 1] >= contents.sends[0, 1] * 0.5
        assert "Measured in the trace" in path.read_text()
    for P, model, told in (
        ((1, 1, 3, 1), plain, "without worker 2"),
        ((1, 1, 2, 1), nn.Conv2d(1, 1, 3), "this one has a module"),
    ):
        with pytest.raises(ValueError, match=told):
            distdl.report(model, P, (1, 1, 16, 12), tmp_path / "no.html", trace)
    (tmp_path / "other").write_text("{}")
    with pytest.raises(ValueError, match=r"is no trace that distdl\.trace has written"):
        distdl.report(plain, (1, 1, 2, 1), (1, 1, 16, 12), tmp_path / "no.html", tmp_path / "other")
    assert not (tmp_path / "no.html").exists()


def test_worker_0_writes_the_page(tmp_path):
    def work():
        rank = distdl.world().rank
        distdl.report(nn.Linear(4, 4), (2, 1), (4, 4), tmp_path / f"{rank}.html", splits=False)

    distdl.run_workers(work, 2)
    assert [one.name for one in tmp_path.iterdir()] == ["0.html"]


def test_what_cannot_be_is_a_clear_error(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "page.html"):
        with pytest.raises(OSError, match="report needs a path that it can write"):
            distdl.report(nn.Linear(4, 4), (2, 1), (4, 4), path)
    path = tmp_path / "page.html"
    with pytest.raises(ValueError, match="at least 1 along each axis"):
        distdl.report(nn.Linear(4, 4), (0, 1), (4, 4), path)
    with pytest.raises(ValueError, match="input_shape needs whole numbers"):
        distdl.report(nn.Linear(4, 4), (2, 1), "4x4", path)
    assert not path.exists()


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    (tmp_path / "nets_of_reports.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(4, 4)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["report", "nets_of_reports:net", "--input", "4x4", "--partition", "2x1", "-o"]
    assert main([*words, "page.html"]) == 0 and "Linear over 2x1 workers" in (tmp_path / "page.html").read_text()
    with pytest.raises(SystemExit) as ended:
        main([*words, "nowhere/page.html"])
    assert ended.value.code == 2 and "report needs a path that it can write" in capsys.readouterr().err


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_a_browser_shows_it_on_a_phone(made, tmp_path):
    """Where there is no browser, the page is still checked by the tests above."""
    _, text, _ = made
    if BROWSER is None:
        return
    # headless windows are at least 500 pixels wide, so the phone is a frame
    probe = (
        "<script>onerror=e=>{document.title='error '+e};onload=()=>{"
        "let d=document.querySelector('iframe').contentDocument;d.querySelector('button').click();"
        "let n=q=>d.querySelectorAll('#model details'+q).length;"
        "document.title=[d.documentElement.scrollWidth,n('[open]'),n('')].join(' ')}</script>"
    )
    frame = tmp_path / "frame.html"
    quoted = text.replace("&", "&amp;").replace('"', "&quot;")
    frame.write_text(f'{probe}<iframe width="390" height="800" style="border:0" srcdoc="{quoted}"></iframe>')
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=50)
    title = re.search(r"<title>(\d+) (\d+) (\d+)</title>", done.stdout)
    assert title, done.stderr[-2000:]
    width, opened, modules = map(int, title.groups())
    assert width <= 390 and opened == modules > 5
    assert "CONSOLE" not in done.stderr
