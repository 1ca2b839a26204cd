"""Wheels: host only, and with nvcc from PyPI on a machine that has none."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.build

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, pagedkv
pool = pagedkv.Pool(block_bytes=4096, num_blocks=4, device="auto")
pool.free(pool.allocate())
assert os.path.isfile(os.path.join(pagedkv.get_include(), "pagedkv", "pagedkv.h"))
assert os.path.isfile(os.path.join(pagedkv.get_cmake_dir(), "pagedkvConfig.cmake"))
"""


def run(*command, **environment) -> str:
    words = [os.fspath(word) for word in command]
    result = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, f"{words}\n{result.stdout}{result.stderr}"
    return result.stdout


def build_wheel(name: str, folder: Path, **environment) -> Path:
    # A build folder of its own, so that nothing of another build is in use.
    build_dir = ROOT / "build" / name
    shutil.rmtree(build_dir, ignore_errors=True)
    setting = f"--config-settings=build-dir={build_dir}"
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, setting, ROOT, **environment)
    return next(folder.glob("*.whl"))


def install(wheel: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "pip", "install", wheel)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel("test_wheel", tmp_path_factory.mktemp("wheel"), PAGEDKV_CUDA="off")


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("venv"))


def test_wheel_works_by_itself(python):
    run(python, "-I", "-c", PROGRAM)
    assert "host" in run(python.with_name("pagedkv"), "info")


def test_wheel_holds_one_plain_library(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if "libpagedkv" in name] == ["pagedkv/lib/libpagedkv.so"]


def test_wheel_holds_what_clients_need(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert {"pagedkv/include/pagedkv/pagedkv.h", "pagedkv/py.typed", "pagedkv/abi.pxd",
            "pagedkv/lib/pkgconfig/pagedkv.pc", "pagedkv/lib/cmake/pagedkv/pagedkvConfig.cmake"} <= names  # fmt: skip
    sources = sorted((ROOT / "python" / "pagedkv").glob("*.pyx"))
    assert sources
    for source in sources:
        assert f"pagedkv/{source.stem}{suffix}" in names
    assert not {name for name in names if name.endswith((".pyx", ".c", ".cc", ".a"))}


def test_clients_of_the_wheel(python, tmp_path):
    """A C program finds the library of the installed package by CMake."""
    cmake_dir = run(python, "-I", "-c", "import pagedkv; print(pagedkv.get_cmake_dir())").strip()
    run("cmake", "-S", Path(__file__).with_name("consumer"), "-B", tmp_path, "-G", "Ninja",
        f"-Dpagedkv_DIR={cmake_dir}")  # fmt: skip
    run("cmake", "--build", tmp_path)
    run(tmp_path / "consumer")


def test_nvcc_from_pypi(tmp_path):
    """By nvcc of the wheels, whatever the machine has; without a device the package works too."""
    # Where the machine has an nvcc, this is the one build with another: for one architecture then, that is compiled
    # fastest. Else the compiler cache knows the objects from the other builds.
    architectures = {"CUDAARCHS": "80-real"} if shutil.which("nvcc") else {}
    wheel = build_wheel("test_wheel_cuda", tmp_path, PAGEDKV_CUDA="on", PAGEDKV_NVCC="wheel", **architectures)
    toolkit = os.readlink(ROOT / "build" / "test_wheel_cuda" / "nvcc_toolkit")
    assert toolkit.endswith("site-packages/nvidia/cu13")
    python = install(wheel, tmp_path / "venv")
    run(python, "-I", "-c", PROGRAM)
    report = run(python, "-I", "-c", "import pagedkv; print(pagedkv.cuda_info())")
    assert "13000" in report


def test_on_without_nvcc_is_an_error(tmp_path):
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DPAGEDKV_CUDA=ON", "-DPAGEDKV_NVCC=SYSTEM"]
    result = subprocess.run([*command, "-DCMAKE_CUDA_COMPILER=/nonexistent/nvcc"], capture_output=True, text=True)
    assert result.returncode != 0
    assert "PAGEDKV_CUDA=ON, but /nonexistent/nvcc" in " ".join(result.stderr.split())
