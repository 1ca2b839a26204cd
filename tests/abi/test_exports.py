"""libpagedkv exports the functions of pagedkv.h and nothing else."""

import os
import re
import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).resolve().parents[2] / "include" / "pagedkv" / "pagedkv.h"


def declared_functions(header: Path) -> set[str]:
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    return set(re.findall(r"PKV_API\b[^;(]*\b(pkv_\w+)\s*\(", text))


def exported_symbols(library: Path) -> set[str]:
    lines = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in lines.splitlines()}


def needed_libraries(library: Path) -> set[str]:
    lines = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"NEEDED.*\[(.*)\]", lines))


@pytest.fixture(scope="module")
def library() -> Path:
    import pagedkv

    return Path(os.fspath(pagedkv.get_library()))


def test_exports_are_the_declared_functions(library):
    functions = declared_functions(HEADER)
    assert len(functions) > 30
    assert exported_symbols(library) == functions


def test_needs_the_c_and_cpp_runtime_alone(library):
    """No CUDA library and no framework: it loads on any machine."""
    allowed = r"lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so\.\d+|ld-linux.*"
    assert not {name for name in needed_libraries(library) if not re.fullmatch(allowed, name)}
