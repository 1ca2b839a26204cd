"""The C tests leave out no function of pagedkv.h."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = re.sub(r"/\*.*?\*/", "", (ROOT / "include" / "pagedkv" / "pagedkv.h").read_text(), flags=re.DOTALL)
FUNCTIONS = dict(re.findall(r"PKV_API\b[^;(]*?\b(pkv_\w+)\s*\(([^;]*)\)\s*;", HEADER))
TESTS = {path.name: path.read_text() for path in (ROOT / "tests" / "abi").glob("*.c")}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_is_called(function):
    assert any(re.search(rf"\b{function}\(", text) for text in TESTS.values())


@pytest.mark.parametrize("function", [name for name, parameters in FUNCTIONS.items() if "*" in parameters])
def test_gets_null_pointers(function):
    assert re.search(rf"\b{function}\([^;]*\bNULL\b", TESTS["null_pointers.c"] + TESTS["null_pointers_data.c"])
