"""The report in a browser: headless Chromium, driven by Playwright. No message of the console,
no request, nothing that overlaps at two widths, enough contrast in both themes, and every control
by keyboard.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_runs

from rlhf_mc.report.page import read_runs, write_report

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: requirements/dev.txt"
)

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs Chromium: apt-get install --no-install-recommends chromium"
    ),
]
WIDE = 1280
NARROW = 390

# The boxes of all visible text, each clipped by the scrolling box that it is in.
TEXTS = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("script, noscript, option, title, .skip")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const clip = parent.closest(".scroll")?.getBoundingClientRect();
    for (let box of range.getClientRects()) {
      let [left, top, right, bottom] = [box.left, box.top, box.right, box.bottom];
      if (clip) {
        [left, top] = [Math.max(left, clip.left), Math.max(top, clip.top)];
        [right, bottom] = [Math.min(right, clip.right), Math.min(bottom, clip.bottom)];
      }
      if (right - left > 1 && bottom - top > 1) found.push({ node, parent, left, top, right, bottom });
    }
  }
  return found;
}"""  # noqa: E501
OVERLAPS = f"""() => {{
  const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  const texts = ({TEXTS})();
  const named = (text) => text.node.textContent.trim().slice(0, 40);
  const out = [];
  for (const [i, a] of texts.entries())
    for (const b of texts.slice(i + 1))
      if (a.node !== b.node && overlap(a, b)) out.push(`${{named(a)}} / ${{named(b)}}`);
  const boxes = [...document.querySelectorAll("h1, h2, h3, figure, .scroll, .note, button, select, input, .pair, .run")]
    .filter((one) => one.getClientRects().length);
  for (const [i, a] of boxes.entries())
    for (const b of boxes.slice(i + 1))
      if (!a.contains(b) && !b.contains(a) && overlap(a.getBoundingClientRect(), b.getBoundingClientRect()))
        out.push(`<${{a.outerHTML.slice(0, 60)}} / ${{b.outerHTML.slice(0, 60)}}`);
  for (const text of texts)
    if (text.left < -1 || text.right > document.documentElement.clientWidth + 1) out.push(`outside: ${{named(text)}}`);
  for (const text of document.querySelectorAll("svg text")) {{
    const [inner, outer] = [text, text.closest("figure")].map((one) => one.getBoundingClientRect());
    if (inner.left < outer.left || inner.right > outer.right) out.push(`outside of its chart: ${{text.textContent}}`);
  }}
  return {{ out, num: texts.length }};
}}"""  # noqa: E501
# WCAG 2.2, 1.4.3 and 1.4.11: the contrast of text is at least 4.5, that of what a chart draws at
# least 3.
CONTRASTS = f"""() => {{
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {{
    const linear = (n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = numbers(color).map((n) => linear(n / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }};
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const behind = (element) => {{
    for (let at = element; at; at = at.parentElement) {{
      const color = getComputedStyle(at).backgroundColor;
      if (numbers(color).length === 3 || numbers(color)[3] === 1) return color;
    }}
  }};
  const out = [];
  const check = (element, color, least, name) => {{
    const found = ratio(color, behind(element));
    if (!(found >= least)) out.push(`${{found.toFixed(2)}}: ${{name}} (${{color}} on ${{behind(element)}})`);
  }};
  for (const {{ node, parent }} of ({TEXTS})()) {{
    const style = getComputedStyle(parent);
    check(parent, parent.closest("svg") ? style.fill : style.color, 4.5, node.textContent.trim().slice(0, 40));
  }}
  for (const drawn of document.querySelectorAll("svg .curve, #phases rect")) {{
    const style = getComputedStyle(drawn);
    check(drawn.closest("figure"), style.fill === "none" ? style.stroke : style.fill, 3, drawn.outerHTML.slice(0, 40));
  }}
  return [...new Set(out)];
}}"""  # noqa: E501


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the reports of a long run, of two runs, and of a run that has only begun."""
    root = tmp_path_factory.mktemp("report")
    one = report_runs.write_run(root / "long_run")
    two = report_runs.write_run(
        root / "another_run_with_a_long_name", num_steps=300, seed=2, lr=3e-6, health=False
    )
    begun = root / "begun"
    begun.mkdir()
    (begun / "run.json").write_text('{"run_id": "x"}')
    runs = {"one": [one], "two": [one, two], "begun": [begun]}
    for name, directories in runs.items():
        write_report(read_runs(directories), root / f"{name}.html")
    return {name: root / f"{name}.html" for name in runs}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Chromium's sandbox needs a user other than root, or namespaces that a container may not
        # have.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """Yield a function that opens a report; no page may write to the console or ask for anything
    but itself."""
    contexts = []
    problems: list[str] = []

    def open_page(name: str, scheme: str = "light", width: int = WIDE) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        address = pages[name].as_uri()
        page.on(
            "request",
            lambda request: problems.append(request.url) if request.url != address else None,
        )
        page.goto(address)
        page.wait_for_function("document.querySelectorAll('#sample-table > *').length > 0")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.parametrize(("name", "num_charts"), [("one", 13), ("two", 13), ("begun", 0)])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_nothing_overlaps_and_all_is_legible(
    opened: Any, name: str, num_charts: int, width: int
) -> None:
    page = opened(name, "light", width)
    assert page.locator("#charts figure").count() == num_charts
    for button in page.locator("figcaption button[aria-expanded]").all()[:2]:
        button.click()
    found = page.evaluate(OVERLAPS)
    assert found["out"] == [] and found["num"] > (200 if num_charts else 15)
    if width == NARROW:
        return  # its colours are those of the wide page
    for scheme, back in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 28)")):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == back
        assert page.evaluate(CONTRASTS) == []


def test_the_checks_find_what_they_look_for(opened: Any) -> None:
    page = opened("one")
    page.add_style_tag(
        content="#charts figure:nth-child(2) { margin-left: -60px } .note { color: #999 }"
    )
    assert any("Validation" in line or "figure" in line for line in page.evaluate(OVERLAPS)["out"])
    assert any("Arrow keys" in line for line in page.evaluate(CONTRASTS))


def test_every_control_is_reached_and_seen_by_tab(opened: Any) -> None:
    page = opened("one")
    wanted = page.evaluate("""() => {
      const all = document.querySelectorAll("a, button, select, input, [tabindex='0']");
      [...all].forEach((one, i) => { one.dataset.stop = i; });
      return all.length;
    }""")
    reached = []
    for _ in range(wanted):
        page.keyboard.press("Tab")
        stop, outline = page.evaluate("""() => {
          const at = document.activeElement;
          return [at.dataset.stop, getComputedStyle(at).outlineStyle];
        }""")
        reached.append(int(stop))
        assert outline != "none", page.evaluate("document.activeElement.outerHTML")
    assert reached == list(range(wanted)) and wanted > 40, "in the order of the page"


def test_controls_by_keyboard(opened: Any) -> None:
    page = opened("one")
    page.locator("#theme").focus()
    for name, back in (
        ("light", "rgb(255, 255, 255)"),
        ("dark", "rgb(20, 23, 28)"),
        ("system", "rgb(255, 255, 255)"),
    ):
        page.keyboard.press("Enter")
        assert page.locator("#theme").inner_text() == f"Theme: {name}"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == back
    page.locator("#smooth").focus()
    page.keyboard.press("Space")
    assert page.locator("#smooth").get_attribute("aria-pressed") == "true"
    assert page.locator("#chart-reward .pale").count() == 4
    help_button = page.locator("#chart-kl-old figcaption button")
    help_button.focus()
    page.keyboard.press("Enter")
    assert "old log-prob" in page.locator("#chart-kl-old .about").inner_text()
    entry = page.locator("#chart-clip .legend button").first
    entry.focus()
    before = page.locator("#chart-clip figcaption ~ svg .curve").count()
    page.keyboard.press("Space")
    assert (
        entry.get_attribute("aria-pressed") == "false"
        and page.locator("#chart-clip figcaption ~ svg .curve").count() == before - 2
    )
    page.locator("#metric").select_option("perf/mfu/critic")
    page.locator("#add").focus()
    page.keyboard.press("Enter")
    name = page.evaluate("document.activeElement.closest('figure').id")
    chart = page.locator(f"#{name}")
    assert chart.locator("strong").inner_text() == "perf/mfu/critic"
    chart.locator("button", has_text="×").press("Enter")
    assert chart.count() == 0
    for key in ("actor/\u00e9", "actor/\u00fc"):
        page.evaluate(
            "([key]) => { for (const run of DATA.runs) run.curves.metrics[key] = run.curves.steps; "
            "}",
            [key],
        )
        page.evaluate("([key]) => { DATA.metrics[key] = {}; addMetric(key); }", [key])
        assert page.locator("#charts figure", has_text=key).count() == 1


def test_values_and_steps_by_keyboard_and_pointer(opened: Any) -> None:
    page = opened("one")
    chart = page.locator("#chart-kl-old")
    chart.locator("svg[tabindex]").focus()
    page.keyboard.press("End")
    assert chart.locator(".values").inner_text().startswith("Step 500: 0.00")
    page.keyboard.press("ArrowLeft")
    assert chart.locator(".values").inner_text().startswith("Step 499: ")
    page.locator("#from").fill("290")
    page.locator("#to").fill("310")
    page.locator("#to").press("Enter")
    assert chart.locator(".event").count() == 2
    page.locator("#chart-kl-old svg[tabindex]").focus()
    page.keyboard.press("Home")
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    reading = chart.locator(".values").inner_text()
    assert reading.startswith("Step 300: 0.04") and "ppo_kl: actor/ppo_kl is 0.043" in reading
    page.locator("#whole").press("Enter")
    box = chart.locator("svg[tabindex]").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 80)
    page.mouse.up()
    low = int(page.locator("#from").input_value())
    high = int(page.locator("#to").input_value())
    assert 150 < low < 260 and 280 < high < 380


def test_samples_are_chosen_by_kind_and_step(opened: Any) -> None:
    page = opened("two")
    columns = page.locator("#sample-tools select")
    assert columns.count() == 2 and page.locator(".pair").count() == 2
    assert page.locator(".pair").first.inner_text().count("At step") == 2
    columns.first.select_option(label="long_run, step 100")
    assert "At step 100: 6" in page.locator(".pair").first.inner_text()
    page.locator("#sample-tools button", has_text="Training").press("Enter")
    assert "500 </script><b>" in page.locator(".pair").first.inner_text()


def test_tokens_are_coloured_by_a_value(opened: Any) -> None:
    page = opened("one")
    page.locator("#sample-tools button", has_text="Training").press("Enter")
    assert page.locator("#sample-tools select").count() == 4
    steps = [page.locator("#sample-tools select").nth(i).input_value() for i in range(3)]
    assert steps == ["0:0", "0:200", "0:500"], "the first, a middle one and the last"
    assert (
        page.locator(
            "#sample-table img, #sample-table b, #sample-table i, #sample-table script"
        ).count()
        == 0
    )
    first = page.locator(".tokens").first
    assert first.inner_text() == (
        '0 </script><b>↵\nright" onmouseover=alert(1) </span><img src=x>\ud800\u202e<|end|> … (900 '
        "tokens)"
    )
    spans = first.locator("span")
    assert (
        spans.count() == 8
        and spans.evaluate_all("all => all.filter((one) => one.onmouseover).length") == 0
    )
    assert spans.nth(2).get_attribute("title").split("\n")[:3] == [
        "token 3",
        "advantage: 0.25",
        "critic's value: 0.3",
    ]
    assert spans.evaluate_all("all => all.map((one) => one.className)")[2:5] == [
        "left-out",
        "drawn",
        "outside",
    ]

    assert first.evaluate(
        """(tokens) => {
          const range = document.createRange();
          range.selectNodeContents(tokens.lastChild);
          const [note, token] = [range, tokens.lastElementChild].map((one) => one.getBoundingClientRect());
          return note.left >= token.right - 1 || note.top >= token.bottom - 1;
        }"""  # noqa: E501
    ), "no token turns the text after it around"

    def levels() -> list[str]:
        colours = spans.evaluate_all("all => all.map((one) => one.style.background)")
        return [colour.removeprefix("var(--").removesuffix(")") for colour in colours]

    assert levels() == ["high3", "high2", "card", "low1", "card", "low2", "low3", "card"]
    scale = page.locator(".scale span")
    for name, ends in (
        ("engine", ["≤ -0.25", "0", "≥ 0.25"]),
        ("loss", ["left out", "environment's", "in the loss"]),
    ):
        page.locator("#colour").select_option(name)
        assert levels()[2] == "low3" and scale.all_inner_texts() == ends
    assert levels()[:2] == ["high3", "high3"]
    own = page.locator(".pair", has_text="Name a prime above").first
    assert own.inner_text().count("Name a prime above") == 3 and "score -1" in own.inner_text()
    for width in (NARROW, WIDE):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(OVERLAPS)["out"] == []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name in ("advantage", "value", "log_prob"):
            page.locator("#colour").select_option(name)
            assert page.evaluate(CONTRASTS) == []
    page.locator("#colour").select_option("")
    assert (
        page.locator(".tokens").count() == 0
        and "0 </script><b>" in page.locator(".pair").first.inner_text()
    )
    page.locator("#sample-tools select").first.select_option(label="long_run, step 100")
    assert "100 </script><b>" in page.locator(".pair").first.inner_text()
