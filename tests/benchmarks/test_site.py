"""The pages that `python -m benchmarks.site` writes for the site generator; `make docs` builds the
site itself.
"""

import dataclasses
import json
import re
import typing
from pathlib import Path

import pytest

import jaxlc
from benchmarks.site import layout, links, notebook_page, pages, reference
from jaxlc.config.frozen import SECTIONS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The directory of the pages."""
    target = tmp_path_factory.mktemp("pages")
    pages.write(target)
    return target


def test_reference_pages_match_the_code():
    pages_with_text = pages.reference_pages()
    outdated = [path.name for path, text in pages_with_text.items() if path.read_text() != text]
    assert outdated == [], "run `make reference`"
    by_name = {path.name: text for path, text in pages_with_text.items()}
    keys = [
        f"{section}.{name}"
        for section in SECTIONS
        for name, kind in typing.get_type_hints(SECTIONS[section]).items()
        if not dataclasses.is_dataclass(kind)  # a nested section has rows of its own
    ]
    assert [key for key in keys if f"\n| `{key}` | " not in by_name["config.md"]] == []
    assert (
        "| float32 | dtype float32 (supported: bfloat16, float16) | dtype float32 (supported: bfloat16, float16) |"
        in by_name["support.md"]
    )
    plan = json.loads(next((ROOT / "notebooks" / "data").glob("plan*.json")).read_text())
    records = (plan, plan["memory"], plan["predicted"], plan["ring"], plan["collectives"][0])
    names = set().union(*records) - {"command"}
    assert [name for name in names if f"\n| `{name}` | " not in by_name["plan_fields.md"]] == []


def test_api_page_lists_arguments_and_errors_of_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    public = [name for name in jaxlc.__all__ if callable(getattr(jaxlc, name))]
    assert [name for name in public if f"### `jaxlc.{name}`" not in page] == [] and len(public) > 5
    show = page.partition("### `jaxlc.load`")[2].partition("\n### ")[0]
    assert "    mesh: Mapping[str, int] | None = None,\n" in show and ") -> Result" in show
    assert (
        "\n- `model`, `loss`: " in show
        and "\n**Raises:**\n\n- `jaxlc.core.errors.UserError`: " in show
    )
    assert "  - `num_needles`: " in page  # a list inside an item
    assert "model: LanguageModel\n" in page  # a property


def test_start_page_is_the_readme_with_site_links(written):
    start = (written / "index.md").read_text()
    assert "| result | value | label | source |" in start and "(notebooks/first_run.md)" in start
    assert "`tests/goldens/plans.txt`" in start and "<!--" not in start
    notebook = (written / "notebooks" / "context_parallelism.md").read_text()
    assert "(../overlap.md#packed-documents)" in notebook and "colab" not in notebook
    assert (written / "notebooks" / "context_parallelism-1.png").exists()


def test_page_with_broken_link_raises():
    with pytest.raises(ValueError, match="links to absent.md"):
        pages.page_text("[x](absent.md)", ROOT / "docs" / "plan.md")
    text = "[x](../README.md)\n```sh\n[x](absent.md)\n```\n"
    assert (
        pages.page_text(text, ROOT / "docs" / "plan.md")
        == "[x](index.md)\n```sh\n[x](absent.md)\n```\n"
    )


def test_navigation_lists_every_page(written):
    listed = set(re.findall(r'= "(.*\.md)"', (ROOT / "zensical.toml").read_text()))
    found = {str(path.relative_to(written)) for path in written.rglob("*.md")}
    # benchmarks/index.md lists them
    dated = {name for name in found if re.match(r"benchmarks/\d", name)}
    assert found - dated == listed


def test_links_and_version_are_those_of_pyproject():
    stored = links.updated(links.repository())
    assert [path.name for path, text in stored.items() if path.read_text() != text] == [], (
        "see benchmarks/site/links.py"
    )
    url = "https://github.com/someone/somewhere"
    texts = links.updated(url)
    assert f'repo_url = "{url}"\n' in texts[ROOT / "zensical.toml"]
    assert f'repository-code: "{url}"\n' in texts[ROOT / "CITATION.cff"]
    first, install = json.loads(texts[ROOT / "notebooks" / "first_run.ipynb"])["cells"][:2]
    assert "/github/someone/somewhere/blob/main/notebooks/first_run.ipynb)\n" in first["source"][2]
    assert f'"jaxlc[plot] @ git+{url}")\n' in "".join(install["source"])
    if not links.repository():
        assert not any(
            word in text for text in stored.values() for word in ("colab.research", "repo_url")
        )


def test_notebook_outputs_become_text_and_html(tmp_path):
    outputs = [
        {"output_type": "stream", "text": ["\x1b[1ma\x1b[0m\n"]},
        {
            "output_type": "display_data",
            "data": {"text/html": ["<b>\n</b><pre>1\n2</pre>"], "text/plain": ["x"]},
        },
    ]
    install = {"cell_type": "code", "source": ['JAXLC_SOURCE = "<x>"\n', "pip()"], "outputs": []}
    cells = [install, {"cell_type": "code", "source": ["f()"], "outputs": outputs}]
    notebook = tmp_path / "n.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    html = '<div class="notebook-output"><b> </b><pre>1&#10;2</pre></div>'
    folded = "<pre><code>JAXLC_SOURCE = &quot;&lt;x&gt;&quot;&#10;pip()</code></pre>"
    details = f"<details><summary>Installation</summary>{folded}</details>"
    expected = f"{details}\n\n```python\nf()\n```\n\n```text\na\n```\n\n{html}\n"
    assert notebook_page.markdown(notebook, tmp_path / "n.md") == expected


def test_plan_field_without_comment_raises(monkeypatch):
    class Undocumented:
        seconds: float

    monkeypatch.setitem(reference._RECORDS, "ring", Undocumented)
    with pytest.raises(ValueError, match="seconds of Undocumented has no comment"):
        reference.plan_fields()


def test_layout_faults_are_found_at_the_width_where_they_occur(tmp_path):
    browser = layout.find_browser()
    if browser is None:
        pytest.skip("Chromium is not installed")
    long = "x" * 70  # wider than a phone
    table = f"<table><tr><td><code>{long}</code></td></tr></table>"
    shadow = "overflow-x: auto; background: linear-gradient(red, blue)"
    button = '<button style="position: absolute; right: 0; top: 0; width: 40px; height: 20px">'
    code = f'<code style="display: block; {shadow}">{long}</code>'
    bodies = {
        "good": f'<div class="md-typeset__scrollwrap" style="{shadow}">{table}</div>',
        "no_mark": f'<div class="md-typeset__scrollwrap" style="overflow-x: auto">{table}</div>',
        "wide": table,
        "broken": "<table><tr><td><code>model.layer-<br>kinds</code></td></tr></table>",
        "button": f'<pre style="position: relative">{code}{button}</pre>',
    }
    paths = [tmp_path / f"{name}.html" for name in bodies]
    for path, body in zip(paths, bodies.values(), strict=True):
        path.write_text(f'<!doctype html><div class="md-content">{body}</div>')
    found = list(layout.faults(paths, browser))
    by_page = [(line.split(".")[0], line.split()[2], line.split(": ")[1]) for line in found]
    phone, screen = str(min(layout.WIDTHS)), str(max(layout.WIDTHS))
    assert by_page[1][2].startswith("the page is ")
    assert by_page[:1] + by_page[2:] == [
        ("no_mark", phone, "no mark that it scrolls"),
        ("wide", phone, "does not scroll"),
        ("broken", screen, "a name has a line break"),
        ("broken", phone, "a name has a line break"),
        ("button", phone, "a button covers code"),
    ]
