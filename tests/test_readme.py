"""The README says what the code says."""

import re

from project import ROOT
from unidist import registry
from unidist.cli.backends import markdown

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_capability_table_is_the_one_that_the_backends_declare():
    table = markdown([registry.plugin(name) for name in registry.names()])
    assert table.strip() in README, "run `python -m unidist backends --markdown` and paste it into the README"


def test_every_file_that_is_linked_exists():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_make_target_that_is_named_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for name in re.findall(r"(?:\$ |`)make ([a-z-]+)", README):
        assert name in targets
