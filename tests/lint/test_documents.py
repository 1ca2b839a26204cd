"""The documents: their Python and C runs, their tables are those of the results, their links lead somewhere."""

import functools
import importlib.util
import re
import shutil
import subprocess

import pytest
from abi_header import ROOT

import pagedkv

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "libpagedkv/README.md",
                                   "tests/README.md")]
DOCUMENTS += [ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks_of(path, language):
    """Code blocks of a document: (line, text)."""
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, match.start()) + 1, match[1]


def with_blocks(language):
    return [path for path in DOCUMENTS if any(blocks_of(path, language))]


@functools.cache
def load_tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", with_blocks("python"), ids=name_of)
def test_python_runs(path):
    """The blocks of one document run one after another, as a reader would type them."""
    names = {}
    for line, text in blocks_of(path, "python"):
        exec(compile("\n" * line + text, str(path), "exec"), names)


def compile_and_run(source, folder):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = pagedkv.get_library()
    program = folder / "program"
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{pagedkv.get_include()}"]
    subprocess.run([*command, source, library, f"-Wl,-rpath,{library.rpartition('/')[0]}", "-o", program], check=True)
    return subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout


def test_c_quick_start_runs(tmp_path):
    [(_, text)] = blocks_of(ROOT / "README.md", "c")
    source = tmp_path / "quick.c"
    source.write_text(text)
    assert compile_and_run(source, tmp_path) == "0 of 100 tokens were cached\n96 of 100 tokens were cached\n"


def test_article_example_runs(tmp_path):
    assert "as expected" in compile_and_run(ROOT / "examples" / "article.c", tmp_path)


def test_article_shows_the_example():
    """What the page shows is what the example does, but for the indentation."""
    example = strip_lines((ROOT / "examples" / "article.c").read_text())
    for line, text in blocks_of(ROOT / "docs" / "from-the-article.md", "c"):
        assert strip_lines(text) in example, f"docs/from-the-article.md:{line}"


def strip_lines(text):
    return "\n".join(line.strip() for line in text.strip().split("\n"))


def test_set_up_is_two_commands():
    """The first code block of the README; .ci/run takes its commands from there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    commands = block[2].splitlines()
    assert block[1] == "sh" and len(commands) == 2
    assert "pagedkv replay" in commands[0] and commands[1].endswith("pytest")


@pytest.mark.parametrize("path", load_tables().documents(), ids=name_of)
def test_tables_are_those_of_the_results(path):
    tables = load_tables()
    made = tables.make_tables()
    for match in tables.MARKED.finditer(path.read_text(encoding="utf-8")):
        assert match["body"] == made[match["name"]], f"{name_of(path)}: run python benchmarks/tables.py --write"


def test_every_table_is_shown():
    tables = load_tables()
    shown = {match["name"] for path in tables.documents() for match in tables.MARKED.finditer(path.read_text("utf-8"))}
    assert shown == set(tables.make_tables())


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http:", "https:")):
            assert (path.parent / target).exists(), f"{name_of(path)}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_names_exist(path):
    """Every pkv_ name in a document is declared in the header."""
    header = (ROOT / "include" / "pagedkv" / "pagedkv.h").read_text()
    for name in set(re.findall(r"\b(?:pkv|PKV)_\w+", path.read_text(encoding="utf-8"))) - {"PKV_TRY"}:
        if not name.endswith("_"):
            assert re.search(rf"\b{name}\b", header), f"{name_of(path)}: {name}"
