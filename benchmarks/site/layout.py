"""Checks the pages of the built site in headless Chromium, on a screen and on a phone: what is wider
than the screen scrolls, names in tables have one line, and buttons cover no code.

usage: python -m benchmarks.site.layout build/site      after `zensical build`; `make docs` runs it
"""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

WIDTHS = (1280, 390)  # pixels: a screen, a phone
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_HEIGHT = 2000  # pixels
_START = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null'

# Returns a sentence for each fault of the page. Buttons and the boxes of tables are made by
# scripts of the page, which may run after its load event.
_FAULTS = """(async () => {
  const find = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const isReady = () =>
    find(".md-typeset table:not([class])").every((table) => table.closest(".md-typeset__scrollwrap"))
    && find(".md-content pre > code[id]").every((code) => find("button", code.parentElement).length);
  for (let frame = 0; frame < 300 && !isReady(); frame++)
    await new Promise(requestAnimationFrame);
  const faults = isReady() ? [] : ["tables without a box, or code without a button"];
  const name = (node) => (node.textContent || node.getAttribute("src")).trim().slice(0, 50);
  const isShown = (node) => node.getClientRects().length > 0;
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width)
    faults.push(`the page is ${document.documentElement.scrollWidth} pixels wide`);

  for (const code of find(".md-content td code")) {
    const text = document.createRange();
    text.selectNodeContents(code);
    const tops = new Set([...text.getClientRects()].map((line) => Math.round(line.top)));
    if (tops.size > 1) faults.push(`a name has a line break: ${name(code)}`);
  }

  const scrolls = (node) => /auto|scroll/.test(getComputedStyle(node).overflowX);
  const hasMark = (node) =>  // a shadow, or a line of text
    getComputedStyle(node).backgroundImage.includes("gradient")
    || getComputedStyle(node, "::after").content !== "none";
  for (const node of find(".md-content :is(table, pre, img, svg)").filter(isShown)) {
    let box = node.matches("pre") ? node.querySelector("code") || node : node.parentElement;
    while (box !== document.body && !scrolls(box)) box = box.parentElement;
    const isWide = node.matches("pre") ? box.scrollWidth > box.clientWidth
      : node.getBoundingClientRect().width > box.clientWidth + 1;
    if (node.getBoundingClientRect().right > width && box === document.body)
      faults.push(`does not scroll: ${name(node)}`);
    else if (isWide && !hasMark(box)) faults.push(`no mark that it scrolls: ${name(node)}`);
  }

  for (const pre of find(".md-content pre").filter((pre) => isShown(pre) && find("code", pre).length))
    for (const button of find("button", pre)) {
      const place = button.getBoundingClientRect();
      const code = pre.querySelector("code");
      const seen = code.getBoundingClientRect();
      const text = document.createRange();
      text.selectNodeContents(code);
      const covers = (line) => Math.min(line.right, seen.right) > place.left
        && line.left < place.right && line.bottom > place.top && line.top < place.bottom;
      if ([...text.getClientRects()].some(covers)) faults.push(`a button covers code: ${name(code)}`);
    }
  return faults;
})()"""


def check(site: Path) -> None:
    """Prints the faults of the pages, or "skipped" if there is no Chromium.

    Raises:
      SystemExit: a page has faults.
    """
    browser = find_browser()
    if browser is None:
        print(f"layout of the pages: skipped, because {_BROWSERS[0]} is not installed")
        return
    start_seconds = time.monotonic()
    # Dated pages are stored results, and have the same style.
    paths = [path for path in sorted(site.rglob("*.html")) if not path.name[0].isdigit()]
    found = list(faults(paths, browser))
    print(*found, sep="\n", end="\n" * bool(found))
    seconds = time.monotonic() - start_seconds
    print(f"layout of {len(paths)} pages: {len(found)} faults ({seconds:.0f} s)")
    if found:
        raise SystemExit(1)


def find_browser() -> str | None:
    """The path of Chromium or Chrome; None if there is none."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def faults(paths: Iterable[Path], browser: str) -> Iterator[str]:
    """Yields a line for each fault of the pages: page, width and what is wrong.

    Args:
      browser: path of Chromium.
    """
    with _open_page(browser) as page:
        for path in paths:
            page.open(path.resolve().as_uri())
            for width in WIDTHS:
                size = dict(width=width, height=_HEIGHT, deviceScaleFactor=1, mobile=False)
                page.call("Emulation.setDeviceMetricsOverride", **size)
                for fault in page.evaluate(_FAULTS):
                    yield f"{path.name} at {width} pixels: {fault}"


class _Page:
    """A tab of the browser: https://chromedevtools.github.io/devtools-protocol/, as messages that
    end with a zero byte.
    """

    def __init__(self, requests: Any, replies: Any):
        self._requests, self._replies = requests, replies
        self._num_calls, self._session = 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = dict(sessionId=attached["sessionId"])
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_calls += 1
        request = dict(id=self._num_calls, method=method, params=params, **self._session)
        self._requests.write(json.dumps(request).encode() + b"\0")
        self._requests.flush()
        while (message := self._next_message()).get("id") != self._num_calls:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def open(self, url: str) -> None:
        """Returns after the load event."""
        self.call("Page.navigate", url=url)
        while self._next_message().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        reply = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in reply:
            raise RuntimeError(reply["exceptionDetails"]["exception"]["description"])
        return reply["result"]["value"]

    def _next_message(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._replies.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser ended")
            message += byte
        return json.loads(message)


@contextlib.contextmanager
def _open_page(browser: str) -> Iterator[_Page]:
    """Starts the browser, which reads requests from descriptor 3 and writes replies to 4."""
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["sh", "-c", _START, browser, *flags, f"--user-data-dir={profile}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with process:
            try:
                yield _Page(process.stdin, process.stdout)
            finally:
                process.terminate()


if __name__ == "__main__":
    check(Path(sys.argv[1]))
