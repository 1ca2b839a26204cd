"""cmake --install into a prefix, and clients that find it there by CMake and by pkg-config."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.build

ROOT = Path(__file__).resolve().parents[2]
CONSUMER = Path(__file__).with_name("consumer")
VERSION = re.search(r'PKV_VERSION_STRING "([^"]+)"', (ROOT / "include/pagedkv/pagedkv.h").read_text())[1]


def run(*command, **environment) -> str:
    words = [os.fspath(word) for word in command]
    result = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, f"{words}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def build() -> Path:
    folder = ROOT / "build" / "test_install"
    shutil.rmtree(folder, ignore_errors=True)
    run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DPAGEDKV_CUDA=OFF")
    run("cmake", "--build", folder)
    return folder


@pytest.fixture(params=["lib", "lib64", "lib/x86_64-linux-gnu"])
def libdir(request) -> str:
    return request.param


@pytest.fixture
def prefix(build, libdir, tmp_path) -> Path:
    """An installed tree that was moved since, so that no path of the build can be in use."""
    run("cmake", build, f"-DCMAKE_INSTALL_LIBDIR={libdir}")
    run("cmake", "--install", build, "--prefix", tmp_path / "first")
    return shutil.move(tmp_path / "first", tmp_path / "prefix")


def test_find_package(prefix, libdir, tmp_path):
    run("cmake", "-S", CONSUMER, "-B", tmp_path / "consumer", f"-DCMAKE_PREFIX_PATH={prefix}", "-G", "Ninja",
        f"-Dpagedkv_DIR={prefix / libdir / 'cmake' / 'pagedkv'}")  # fmt: skip
    run("cmake", "--build", tmp_path / "consumer")
    assert run(tmp_path / "consumer" / "consumer").strip() == VERSION


def test_pkg_config(prefix, libdir, tmp_path):
    path = {"PKG_CONFIG_PATH": os.fspath(prefix / libdir / "pkgconfig")}
    assert run("pkg-config", "--modversion", "pagedkv", **path).strip() == VERSION
    flags = run("pkg-config", "--cflags", "--libs", "pagedkv", **path).split()
    run("cc", CONSUMER / "consumer.c", "-o", tmp_path / "consumer", *flags)
    assert run(tmp_path / "consumer", LD_LIBRARY_PATH=os.fspath(prefix / libdir)).strip() == VERSION


def test_soname_is_the_major_version(prefix, libdir):
    library = prefix / libdir / "libpagedkv.so"
    assert re.search(r"SONAME.*\[libpagedkv\.so\.(\d+)\]", run("readelf", "-d", library))[1] == VERSION.split(".")[0]
    assert library.resolve().name == f"libpagedkv.so.{VERSION}"


def test_nothing_else_is_installed(prefix, libdir):
    """No test, no internal header, no static library."""
    allowed = [f"{libdir}/libpagedkv.so*", f"{libdir}/cmake/pagedkv/*.cmake", f"{libdir}/pkgconfig/pagedkv.pc",
               "include/pagedkv/*"]  # fmt: skip
    files = {path.relative_to(prefix) for path in prefix.rglob("*") if not path.is_dir()}
    assert not {path for path in files if not any(path.match(pattern) for pattern in allowed)}
