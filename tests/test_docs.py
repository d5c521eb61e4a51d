"""The pages in docs/ name only what there is."""

import ast
import re
from pathlib import Path

import pytest

import unidist

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_in_the_code_exists(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id == "unidist":
                assert hasattr(unidist, node.attr)
            if node.value.id == "strategy":
                assert hasattr(unidist.Strategy, node.attr)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_within_a_page_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    headings = [
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)
    ]
    for target in re.findall(r"\]\(#([^)]*)\)", text):
        assert target in headings
