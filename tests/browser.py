"""A headless browser for the tests of pages."""

import shutil
import subprocess

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


WATCH = """<script>
window.faults = [];
addEventListener("error", e => faults.push(String(e.message)));
addEventListener("unhandledrejection", e => faults.push(String(e.reason)));
addEventListener("securitypolicyviolation", e => faults.push(e.violatedDirective + e.blockedURI));
for (const kind of ["error", "warn"]) console[kind] = (...words) => faults.push(words.join(" "));
</script>"""
ACT = """<script>
const one = css => document.querySelector(css), all = css => [...document.querySelectorAll(css)];
const pause = ms => new Promise(done => setTimeout(done, ms));
const type = (css, text) => { one(css).value = text; one(css).dispatchEvent(new Event("input")); };
(async () => {
  let found = null;
  try { found = await (async () => { %s })(); } catch (error) { faults.push(error.stack); }
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify({found, faults});
  document.body.append(out);
})();
</script>"""


def chromium(tmp_path, *options):
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", "--hide-scrollbars", "--virtual-time-budget=8000"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1600", *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
