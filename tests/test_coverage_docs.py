"""docs/internals/coverage.md: what it names is there, and no ability is without a proof."""

import ast
import re
from functools import cache

import pytest

from .support.places import ROOT

TEXT = (ROOT / "docs/internals/coverage.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md))(?:::(\w+))?`", TEXT)))
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| ability |")
]
PULL_REQUESTS = (
    26805, 26806, 26807, 26808, 26809, 26810, 26815, 26816, 26818, 26819, 26820, 26821, 25015, 26329, 26779,
)  # fmt: skip


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("path", "function"), NAMED)
def test_what_is_named_exists(path: str, function: str) -> None:
    assert (ROOT / path).is_file()
    if function:
        assert function in functions(path)
        assert function.startswith("test_")


def test_every_ability_has_a_place_and_a_proof() -> None:
    assert len(ROWS) > 60
    for ability, place, proof in ROWS:
        assert ability
        assert place
        assert "::test_" in proof or "whole traces" in proof or "nothing is timed in a test" in proof, ability


@pytest.mark.parametrize("number", PULL_REQUESTS)
def test_every_pull_request_is_there(number: int) -> None:
    assert f"#{number}" in TEXT


def test_every_page_stands_in_the_navigation() -> None:
    docs = ROOT / "docs"
    pages = sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r"^ +- (\S+\.md)$", navigation, re.MULTILINE)) == pages
