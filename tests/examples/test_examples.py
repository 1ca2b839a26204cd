"""The Python examples run as they stand, against the installed package. (Those in C and C++ are tests of ctest.)"""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*command):
    return subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout


def test_quickstart():
    text = run(EXAMPLES / "quickstart.py")
    assert "request 0: 0 of 100 prompt tokens are cached" in text
    assert "request 1: 96 of 100 prompt tokens are cached" in text
    assert "refused:" in text
    # The same prompt gives the same output, computed or cached.
    outputs = [line.rsplit(" ", 1)[1] for line in text.splitlines() if "output begins" in line]
    assert len(outputs) == 2 and outputs[0] == outputs[1]


def test_several_devices():
    text = run(EXAMPLES / "several_devices.py")
    assert "host:0: 4 layers of 2 heads, host:1: 4 layers of 2 heads" in text
    assert "host:0: 2 layers of 4 heads, host:1: 2 layers of 4 heads" in text
    assert "equal, bit for bit" in text
    assert "on devices [0, 1], rows [20, 10]" in text and "on devices [1, 1], 20 tokens" in text


def test_ctypes_only():
    import pagedkv

    text = run(EXAMPLES / "ctypes_only.py")
    assert f"libpagedkv {pagedkv.version()}" in text
    assert "copied: keys and values" in text
    assert "refused: OUT_OF_BLOCKS, 3 needed, 1 available" in text
    assert "refused: INVALID_ARGUMENT: " in text


def test_ctypes_only_needs_no_package():
    """With a path the package is not even imported."""
    import pagedkv

    code = f"import runpy, sys; sys.argv[1:] = [{str(pagedkv.get_library())!r}]\n"
    code += f"runpy.run_path({str(EXAMPLES / 'ctypes_only.py')!r}, run_name='__main__')\n"
    code += "assert 'pagedkv' not in sys.modules\n"
    assert "allocated blocks [0, 1, 2]" in run("-c", code)
