"""The page in a real browser: no errors, no requests, and its buttons and values work."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from tests.trainer.watch.runs import make_run
from trainer.report import main

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--enable-logging=stderr", "--virtual-time-budget=2000",
)  # fmt: skip

USE = """
const at = (element, type) => {
  const box = element.getBoundingClientRect();
  element.dispatchEvent(new PointerEvent(type, {clientX: box.left + box.width, clientY: box.top + 5, bubbles: true}));
};
const said = [];
const charts = [...document.querySelectorAll(".chart[data-range]")];
for (const chart of charts) {
  at(chart.querySelector(".area"), "pointermove");
  said.push(chart.querySelector(".tip").innerText);
}
const step = charts.find((chart) => chart.dataset.stacked === "1");
const before = step.querySelector("path.band").getAttribute("d");
step.querySelectorAll("button")[1].click();
said.push(String(before !== step.querySelectorAll("path.band")[0].getAttribute("d")));
const run = document.querySelector(".runs button");
run.click();
said.push([...document.querySelectorAll('path[data-run="0"]')].every((one) => one.style.display === "none") + "");
said.push([...document.querySelectorAll('path[data-run="1"]')].every((one) => one.style.display === "") + "");
run.click();
said.push([...document.querySelectorAll('path[data-run="0"]')].every((one) => one.style.display === "") + "");
said.push(String(document.documentElement.scrollWidth <= window.innerWidth));
document.body.dataset.said = JSON.stringify(said);
"""


def browse(file, profile, *flags):
    """What the browser makes of a page, and what it says on its console."""
    done = subprocess.run(
        [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def requests(log):
    """What a page asked for; the browser asks for things of its own, too."""
    asked = [
        line for line in log.read_text().splitlines() if '"network_isolation_key":"file' in line
    ]
    return [url for line in asked for url in re.findall(r'"url":"(http[^"]*)', line)]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_in_a_browser(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    page = tmp_path / "report.html"
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(page)]) == 0
    log, bad = tmp_path / "net.json", tmp_path / "bad.html"
    bad.write_text('<img src="http://127.0.0.1:9/x.png">')
    browse(bad, tmp_path / "bad", f"--log-net-log={log}")
    assert set(requests(log)) == {"http://127.0.0.1:9/x.png"}  # so that we would know
    dom, console = browse(page, tmp_path / "first", f"--log-net-log={log}")
    assert console == []
    assert 'class="tip"' in dom  # the script ran under the page's own policy
    assert requests(log) == []

    # The page's policy lets no other script run, so the one that uses it needs a copy without.
    used = tmp_path / "used.html"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    used.write_text(text.replace("</body>", f"<script>{USE}</script></body>"))
    dom, console = browse(used, tmp_path / "second", "--window-size=500,900")
    assert console == []
    said = json.loads(unescape(re.search(r'data-said="([^"]*)"', dom)[1]))
    assert said[0].startswith("step 30\n")
    assert any("communication\n20.00 ms" in text for text in said), said
    assert said[-5:] == ["true"] * 5
