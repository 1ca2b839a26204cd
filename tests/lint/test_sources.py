"""Rules of the sources that the compiler does not check."""

import re

import pytest
from abi_header import HEADER, ROOT

FLOORS = {"base": 0, "backend": 1, "pool": 2, "attention": 2, "cache": 3, "api": 4}
SOURCES = sorted(
    path for pattern in ("*.h", "*.cc", "*.cu", "*.cuh") for path in (ROOT / "libpagedkv").rglob(pattern)
)
# Files that a person reads and edits, for the rules of shape.
TEXTS = sorted(
    {
        *SOURCES,
        *(
            path
            for folder in ("include", "python", "tests", "examples", "benchmarks", "cmake", ".ci")
            for suffix in (".h", ".hpp", ".c", ".cc", ".cu", ".py", ".pyx", ".pxd", ".pyi", ".cmake", "")
            for path in (ROOT / folder).rglob("*" + suffix)
            if path.suffix == suffix and path.is_file() and "__pycache__" not in path.parts
        ),
    }
)
MOST_LINES = 600
MOST_HEADER_LINES = 1300  # of the public headers, which stay one file each, and of what Cython reads in their place
MOST_COLUMNS = 132  # the style says 120; a word that runs over is no matter for a test


def name_of(path):
    return str(path.relative_to(ROOT))


def includes_of(path):
    """(line number, text between the quotes or brackets) of each #include."""
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if match := re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line):
            yield number, match[1]


def code_of(path):
    """The text without comments and string literals, lines kept."""
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), path.read_text(), flags=re.DOTALL)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"//[^\n]*", "", text)


@pytest.fixture(params=SOURCES, ids=name_of)
def source(request):
    return request.param


def test_includes_own_floor_and_lower(source):
    """pool and attention stand on one floor, and neither includes the other; host/ and cuda/ are leaves."""
    folders = source.relative_to(ROOT / "libpagedkv").parts[:-1]
    own = folders[0]
    for number, include in includes_of(source):
        where = f"{name_of(source)}:{number}: {include}"
        other = include.split("/")[0]
        if other not in FLOORS:
            continue
        assert (ROOT / "libpagedkv" / include).is_file(), f"{where}: no such file"
        assert other == own or FLOORS[other] < FLOORS[own], f"{where}: {other}/ is no lower floor than {own}/"
        leaf = include.split("/")[1]
        if other == "backend" and leaf in ("host", "cuda"):
            is_allowed = folders[:2] == ("backend", leaf) or name_of(source) in LEAF_CLIENTS[leaf]
            assert is_allowed, f"{where}: {leaf}/ is a leaf"


LEAF_CLIENTS = {"host": ["libpagedkv/backend/backend.cc"], "cuda": ["libpagedkv/backend/backend.cc"]}


def test_cuda_stays_under_backend_cuda(source):
    if source.is_relative_to(ROOT / "libpagedkv" / "backend" / "cuda"):
        return
    assert source.suffix not in (".cu", ".cuh"), name_of(source)
    for number, include in includes_of(source):
        assert not re.match(r"(cuda|cu\w*\.h|nv|cub|cute|cutlass)", include), f"{name_of(source)}:{number}: {include}"


def test_no_print_exit_or_environment(source):
    forbidden = r"\b(printf|fprintf|puts|fputs|putchar|perror|abort|exit|_exit|quick_exit|terminate|getenv|setenv)\s*\("
    for number, line in enumerate(code_of(source).split("\n"), 1):
        found = re.search(forbidden + r"|\bstd::(cout|cerr|clog)\b", line)
        assert not found, f"{name_of(source)}:{number}: {found[0]}"


def test_headers_include_once_and_open_no_namespace(source):
    if source.suffix in (".h", ".cuh"):
        assert "using namespace" not in code_of(source), name_of(source)
        is_part = source.name.endswith(".inc.h")  # compiled once for each instruction set, by several sources
        assert ("#pragma once" in source.read_text()) != is_part, name_of(source)


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_shape(path):
    lines = path.read_text().split("\n")
    most = MOST_HEADER_LINES if path.parent == HEADER.parent or path.name == "abi.pxd" else MOST_LINES
    assert len(lines) < most, f"{name_of(path)} has {len(lines)} lines"
    for number, line in enumerate(lines, 1):
        where = f"{name_of(path)}:{number}"
        assert len(line) <= MOST_COLUMNS, f"{where} has {len(line)} columns"
        assert "\t" not in line, f"{where} has a tab"
        assert line == line.rstrip(), f"{where} ends in a space"
        assert not re.search(r"\b(TO" r"DO|FIX" r"ME)\b", line), f"{where}: {line.strip()}"
