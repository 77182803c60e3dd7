"""Check the documentation that ``make docs`` has built: its links, and the pages as a browser shows them.

    python tools/pages.py docs/_build

Links need no browser. For the rest a Chromium without a window opens pages at two widths, from a server of its own:
no page is wider than the screen, every formula takes room, and nothing is loaded from elsewhere. Two searches list the
page "When something is wrong" first.

Exit status 1: something is wrong. Exit status 2: the links are right, and there is no browser.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import quote_plus, unquote

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1400, 390)
PAGES = (
    "index.html",
    "start/five-minutes.html",
    "guide/distribute.html",
    "guide/clusters.html",
    "wrong.html",
    "coming-from/dtensor.html",
    "concepts/index.html",
    "concepts/moves.html",
    "primitives/halo-exchange.html",
    "details/sharp-edges.html",
    "details/performance.html",
    "reference/index.html",
    "developers/performance.html",
)
FORMULAS = ("concepts/moves.html", "primitives/halo-exchange.html")
SEARCHES = ("hang", "out of memory")
WRONG = "wrong.html"
PROBE = """<body><script>(async () => {
  const found = [];
  for (const width of WIDTHS) for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style.width = width + "px";
    frame.style.height = "900px";
    frame.src = "/" + page;
    document.body.append(frame);
    await new Promise((loaded) => (frame.onload = loaded));
    const inside = frame.contentDocument, formulas = [...inside.querySelectorAll("math")];
    const loaded = frame.contentWindow.performance.getEntriesByType("resource").map((entry) => entry.name);
    found.push({
      page, width,
      needs: inside.documentElement.scrollWidth,
      formulas: formulas.length,
      flat: formulas.filter((one) => one.getBoundingClientRect().height < 4).length,
      elsewhere: loaded.filter((name) => /^https?:/.test(name) && !name.startsWith(location.origin)),
    });
    frame.remove();
  }
  document.body.innerHTML = "<pre></pre>";
  document.querySelector("pre").textContent = JSON.stringify(found);
})()</script></body>"""


def broken_links(folder: Path) -> list[str]:
    """Return a line for each link of a page to a file or an anchor that is not in the folder."""
    anchors = {page.resolve(): _anchors(page) for page in folder.rglob("*.html")}
    broken = []
    for page in sorted(anchors):
        for link in sorted(set(re.findall(r'\b(?:href|src)="([^"]+)"', page.read_text()))):
            target = html.unescape(link)
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            path = unquote(path.partition("?")[0])
            file = (page.parent / path).resolve() if path else page
            file = file / "index.html" if file.is_dir() else file
            if not file.exists() or (anchor and file in anchors and unquote(anchor) not in anchors[file]):
                broken.append(f"{page.relative_to(folder.resolve())}: {target} leads nowhere")
    return broken


def _anchors(page: Path) -> set[str]:
    return set(map(html.unescape, re.findall(r'\b(?:id|name)="([^"]+)"', page.read_text())))


def problems_of(found: list[dict[str, object]]) -> list[str]:
    """Return a line for each fault of the pages, from what the browser has measured."""
    problems = []
    for one in found:
        place = f"{one['page']} at {one['width']} pixels"
        if int(str(one["needs"])) > int(str(one["width"])):
            problems.append(f"{place} is {one['needs']} pixels wide")
        if one["flat"] or (one["page"] in FORMULAS and not one["formulas"]):
            problems.append(f"{place} does not show its formulas")
        if one["elsewhere"]:
            problems.append(f"{place} loads {one['elsewhere']}")
    return problems


class _Server(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/probe":
            return super().do_GET()
        text = PROBE.replace("WIDTHS", json.dumps(WIDTHS)).replace("PAGES", json.dumps(PAGES)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: object) -> None:
        """Say nothing of requests."""


def _shown(browser: str, address: str) -> str:
    """Return the page after its scripts have run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000"]
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *options, f"--user-data-dir={profile}", "--dump-dom", address]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def seen_by(browser: str, folder: Path) -> list[str]:
    """Return a line for each fault that the browser sees."""
    missing = [f"{page} was not built" for page in PAGES if not (folder / page).exists()]
    if missing:
        return missing
    handler = functools.partial(_Server, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        measured = re.search(r"<pre>(.*?)</pre>", _shown(browser, f"{base}/probe"), re.DOTALL)
        problems = problems_of(json.loads(html.unescape(measured[1]))) if measured else ["the browser measured nothing"]
        for words in SEARCHES:
            page = _shown(browser, f"{base}/search.html?q={quote_plus(words)}")
            first = re.search(r'<li class="kind-[^>]*>\s*<a href="([^"?#]*)', page)
            if not first or first[1] != WRONG:
                problems.append(f"a search for {words!r} lists {first[1] if first else 'nothing'} first")
        server.shutdown()
    return problems


def main() -> int:
    """Check the folder that the command line names."""
    folder = Path(sys.argv[1])
    pages = len([*folder.rglob("*.html")])
    if not pages:
        print(f"{folder} has no pages: run make docs")
        return 1
    problems = broken_links(folder)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser:
        problems += seen_by(browser, folder)
    print(*problems, f"{pages} pages, {len(problems)} problems", sep="\n")
    if not browser:
        print(f"no browser looked at them: none of {', '.join(BROWSERS)} is installed")
    return 1 if problems else 0 if browser else 2


if __name__ == "__main__":
    sys.exit(main())
