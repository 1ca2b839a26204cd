"""abi.pxd declares what pagedkv.h does, neither more nor less."""

import re

import pytest
from abi_header import HEADER, ROOT, Declarations, parse_fields, parse_function, read_header

PXD = ROOT / "python" / "pagedkv" / "abi.pxd"


def read_pxd() -> Declarations:
    text = re.sub(r"#.*", "", PXD.read_text())
    text = re.sub(r"\(([^()]*)\)", lambda match: "(" + " ".join(match[1].split()) + ")", text)  # one line a declaration
    body = text[text.index("cdef extern from") :].split("\n")[1:]
    found = Declarations()
    lines = [line for line in body if line.strip()]
    while lines:
        line = lines.pop(0).strip()
        block = []
        while line.endswith(":") and lines and lines[0].startswith(" " * 8):
            block.append(lines.pop(0).strip())
        if match := re.fullmatch(r"(?:ctypedef|cdef) enum (\w+):", line):
            found.enums[match[1]] = re.findall(r"\w+", " ".join(block))
        elif match := re.fullmatch(r"(?:ctypedef|cdef) struct (\w+):", line):
            found.structs[match[1]] = parse_fields(";".join(block)) if block != ["pass"] else []
        elif match := re.fullmatch(r"(?:ctypedef|cdef) struct (\w+)", line):
            found.structs[match[1]] = []
        elif "(" in line and not line.startswith("ctypedef"):
            name, kinds = parse_function(re.sub(r"\)\s*(noexcept|nogil|\s)*$", ")", line))
            found.functions[name] = kinds
    return found


@pytest.fixture(scope="module")
def both():
    return read_header(), read_pxd()


def test_the_header_is_understood():
    header = read_header()
    assert header.functions["pkv_status_name"] == ("const char*", "pkv_status")
    assert header.functions["pkv_cache_create"] == ("pkv_status", "const pkv_cache_options*", "pkv_cache**")
    assert header.functions["pkv_version"] == ("const char*",)
    assert header.structs["pkv_cache"] == []
    assert ("uint64_t", "v_offset") in header.structs["pkv_layer_info"]
    assert ("int64_t[4]", "shape") in header.structs["pkv_tensor"]
    assert header.enums["pkv_toggle"] == ["PKV_DEFAULT", "PKV_ON", "PKV_OFF"]
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    assert set(re.findall(r"\bpkv_\w+(?=\()", text)) == set(header.functions)


@pytest.mark.parametrize("part", ["functions", "structs", "enums"])
def test_pxd_declares_the_same(both, part):
    header, pxd = (getattr(declarations, part) for declarations in both)
    assert sorted(header) == sorted(pxd)
    different = {name: (header[name], pxd[name]) for name in header if header[name] != pxd[name]}
    assert not different, f"name: (pagedkv.h, abi.pxd) {different}"


def test_only_abi_pxd_declares_c():
    for path in sorted(PXD.parent.rglob("*.p[yx]*")):
        if path.suffix in (".pxd", ".pyx") and path != PXD:
            assert "pagedkv.h" not in path.read_text(), f"{path.name} declares parts of pagedkv.h itself"
