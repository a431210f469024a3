"""The pages that `python -m benchmarks.site` writes for the site generator; `make docs` builds the site itself."""

import json
from pathlib import Path

import pytest

from benchmarks import support_table
from benchmarks.site import notebook_page, pages, plain_text, reference
from jaxlc.config.frozen import SECTIONS
from jaxlc.config.setting_paths import fields_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, Path]:
    """The directories of the pages and of their plain text."""
    target, text = tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("text")
    pages.write(target)
    plain_text.write(target, text)
    return target, text


def test_pages_contain_every_setting_and_plan_field(written):
    settings = (written[0] / "config.md").read_text()
    keys = [f"{section}.{name}" for section in SECTIONS for name in fields_of(SECTIONS[section])]
    assert [key for key in keys if f"\n| `{key}` | " not in settings] == []
    fields = (written[0] / "plan_fields.md").read_text()
    plan = json.loads(next((ROOT / "notebooks" / "data").glob("plan*.json")).read_text())
    names = (
        set(plan) - {"command"}
        | set(plan["memory"])
        | set(plan["predicted"])
        | set(plan["ring"])
        | set(plan["collectives"][0])
    )
    assert [name for name in names if f"\n| `{name}` | " not in fields] == []


def test_support_page_contains_tables_of_tests(written):
    page = (written[0] / "support.md").read_text()
    assert support_table.tables() in page and "|  | `ring` | `all_gather` | `ulysses` | `hybrid` |" in page
    assert "| float32 | dtype float32 (supported: bfloat16, float16) | yes | yes | yes |" in page


def test_pages_include_sections_and_site_links(written):
    start = (written[0] / "index.md").read_text()
    assert "| result | value | label | source |" in start and "(notebooks/first_run.md)" in start
    assert "`tests/goldens/plans.txt`" in start and "<!--" not in start
    notebook = (written[0] / "notebooks" / "context_parallelism.md").read_text()
    assert "(../overlap.md#packed-documents)" in notebook and "colab" not in notebook
    assert (written[0] / "notebooks" / "context_parallelism-1.png").exists()


def test_plain_text_lists_pages_with_purpose(written):
    index = (written[1] / "llms.txt").read_text()
    assert "- [Glossary](glossary.md): This page defines the terms" in index and index.startswith("# jaxlc\n\n> ")
    api = (written[1] / "api.md").read_text()
    assert "## jaxlc.attend(" in api and ":::" not in api and api in (written[1] / "llms-full.txt").read_text()
    assert not any("<img" in path.read_text() for path in written[1].rglob("*.md"))


def test_page_with_broken_link_raises():
    with pytest.raises(ValueError, match="links to absent.md"):
        pages.page_text("[x](absent.md)", ROOT / "docs" / "plan.md")
    with pytest.raises(ValueError, match="which has none"):
        pages.page_text("<!-- section of README.md: Absent -->", ROOT / "docs" / "plan.md")
    text = "[x](../README.md)\n```sh\n[x](absent.md)\n```\n"
    assert pages.page_text(text, ROOT / "docs" / "plan.md") == "[x](index.md)\n```sh\n[x](absent.md)\n```\n"


def test_unlisted_page_raises(written, tmp_path):
    (tmp_path / "pages").symlink_to(written[0])
    extra = written[0] / "extra.md"
    extra.write_text("# Extra\n")
    with pytest.raises(ValueError, match=r"does not list: extra\.md"):
        plain_text.write(tmp_path / "pages", tmp_path / "text")
    extra.unlink()


def test_notebook_outputs_become_text_and_html(tmp_path):
    outputs = [
        {"output_type": "stream", "text": ["\x1b[1ma\x1b[0m\n"]},
        {"output_type": "display_data", "data": {"text/html": ["<b>\n</b><pre>1\n2</pre>"], "text/plain": ["x"]}},
    ]
    cells = [{"cell_type": "code", "source": ["f()"], "outputs": outputs}]
    notebook = tmp_path / "n.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    html = '<div class="notebook-output"><b> </b><pre>1&#10;2</pre></div>'
    expected = f"```python\nf()\n```\n\n```text\na\n```\n\n{html}\n"
    assert notebook_page.markdown(notebook, tmp_path / "n.md") == expected


def test_plan_field_without_comment_raises(monkeypatch):
    class Undocumented:
        seconds: float

    monkeypatch.setitem(reference._RECORDS, "ring", Undocumented)
    with pytest.raises(ValueError, match="seconds of Undocumented has no comment"):
        reference.plan_fields()
