"""The README and the pages in docs/ show what there is: their code runs, their commands parse, their links lead on."""

import argparse
import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap

import pytest

import pages
import unidist
from project import ROOT
from unidist import cli, registry
from unidist.launch.environments import interpreter_for

TIMEOUT = 300
NOT_RUN = 2  # blocks of Python that are marked so, with the reason in the page
# Its code is that of files, line by line, as tests/test_plugin_example.py sees; the files are run there.
EXCERPTS = ROOT / "docs" / "write-a-backend.md"
# Programs that the pages tell the reader to start, beside unidist's own.
OTHERS = {"pip", "cd", "horovodrun", "mpirun", "srun", "export"}

every_page = pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)


def python_blocks(page):
    return [block for block in pages.blocks(page) if block.language == "python"]


def cells(page):
    return [(block.line, textwrap.dedent(block.text)) for block in python_blocks(page) if block.not_run is None]


# A page that shows the same code as another, as the front page of the site does, needs no process of its own.
WITH_CODE = {
    tuple(text for _, text in cells(page)): page for page in reversed(pages.PAGES) if cells(page) and page != EXCERPTS
}


@pytest.mark.parametrize("page", WITH_CODE.values(), ids=lambda page: page.name)
def test_every_python_block_runs(page, tmp_path):
    """All blocks of a page, in order, in one process of the framework that the page is about."""
    python, variables = interpreter_for(pages.environment(page))
    path = os.pathsep.join([variables.pop("PYTHONPATH"), str(ROOT / "examples")])
    done = subprocess.run(
        [python, str(ROOT / "tests" / "run_page.py")],
        input=json.dumps([str(page.relative_to(ROOT)), cells(page)]),
        env={**os.environ, **variables, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_blocks_that_do_not_run_are_few_and_say_why():
    marked = [(page.name, block) for page in pages.PAGES for block in python_blocks(page) if block.not_run]
    assert len(marked) == NOT_RUN, [(page, block.line, block.not_run) for page, block in marked]


@every_page
def test_every_name_in_the_code_exists(page):
    """Also in blocks that are not run."""
    for block in python_blocks(page):
        for node in ast.walk(ast.parse(textwrap.dedent(block.text))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id == "unidist":
                assert hasattr(unidist, node.attr)
            if node.value.id == "strategy":
                assert hasattr(unidist.Strategy, node.attr)


def is_cheap(arguments):
    return arguments[:1] == ["backends"] or {"--help", "--version", "--dry-run", "--dry-run=json", "--list"} & set(
        arguments
    )


def check_unidist(arguments):
    if is_cheap(arguments):
        command = [sys.executable, "-m", "unidist", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0, done.stderr
    else:
        assert arguments[0] in cli.COMMANDS
        parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
        module = importlib.import_module(f"unidist.cli.{arguments[0]}")
        module.configure(parser)
        parser.parse_args(arguments[1:])


@every_page
def test_every_command_is_one_that_can_be_typed(page):
    """Those that cost nothing are run, the others of unidist go through its own parser."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for command in pages.commands(page):
        words = [word for word in shlex.split(command, comments=True) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if words[:3] == ["python", "-m", "unidist"]:
            check_unidist(words[3:])
        elif words[0] == "unidist":
            check_unidist(words[1:])
        elif words[0] == "make":
            assert set(words[1:]) <= set(targets), command
        else:
            assert words[0] in OTHERS or words[0] in ("python", "torchrun"), command
        for word in words:
            if re.match("(examples|tests|docs)/", word):
                assert (ROOT / word).exists(), command


def headings(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return [
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)
    ]


@every_page
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match("[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), target
        assert not heading or heading in headings(there), target


@every_page
def test_every_page_of_the_site_is_in_its_menu(page):
    if page.name != "README.md":
        menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in menu


@pytest.mark.parametrize("backend", ["torch", "mxnet", "oneflow", "horovod"])
def test_every_option_of_a_backend_is_explained_with_its_default(backend):
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {backend}\n(.*?)(?=^## |\Z)", text, re.S | re.M)[1]
    told = {
        name: ast.literal_eval(default) for name, default in re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, re.M)
    }
    options = registry.plugin(backend).options
    assert told == {name: field.default for name, field in options.__dataclass_fields__.items()}


def test_the_site_is_built_without_a_warning(tmp_path):
    setup = [sys.executable, "-m", "unidist", "setup", "docs", "--print-python"]
    python = subprocess.run(
        setup, cwd=ROOT, capture_output=True, text=True, timeout=2 * TIMEOUT, check=True
    ).stdout.strip()
    build = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    site = list((tmp_path / "site").rglob("*.html"))
    assert len(site) > 15
    for page in site:
        loaded = re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text(encoding="utf-8")
        )
        assert not loaded, f"{page} loads something over the network"
