"""What the build backend asks pip to install: nvcc from PyPI only where it is needed."""

import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

BACKEND = Path(__file__).resolve().parents[2] / "cmake" / "build_backend" / "pagedkv_build.py"
WHEELS = ["cuda-toolkit[nvcc,cudart,cccl]==13.0.*"]


@pytest.fixture
def backend(monkeypatch):
    """The backend over a stand-in for scikit-build-core, on a Linux machine without nvcc."""
    build = types.ModuleType("scikit_build_core.build")
    build.get_requires_for_build_wheel = lambda config_settings=None: ["ninja"]
    build.get_requires_for_build_editable = lambda config_settings=None: ["ninja"]
    package = types.ModuleType("scikit_build_core")
    package.build = build
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", build)
    for name in ("PAGEDKV_CUDA", "PAGEDKV_NVCC", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("pagedkv_build_under_test", BACKEND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SYSTEM_FOLDERS", ["/nonexistent"])
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", "/nonexistent")
    return module


@pytest.fixture
def toolkit(tmp_path):
    """A folder that looks like CUDA_HOME."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return nvcc.parents[1]


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_without_nvcc_the_wheels_are_added(backend, hook):
    assert getattr(backend, hook)() == ["ninja", *WHEELS]


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false", "no"])
def test_off_asks_for_nothing(backend, monkeypatch, value):
    assert backend.cuda_requirements({"cmake.define.PAGEDKV_CUDA": value}) == []
    monkeypatch.setenv("PAGEDKV_CUDA", value)
    assert backend.cuda_requirements() == []
    assert backend.cuda_requirements({"cmake.define.PAGEDKV_CUDA": "on"}) == WHEELS


@pytest.mark.parametrize("variable", ["CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT", "PATH"])
def test_a_system_nvcc_is_enough(backend, monkeypatch, toolkit, variable):
    value = {"CUDACXX": toolkit / "bin" / "nvcc", "PATH": toolkit / "bin"}.get(variable, toolkit)
    monkeypatch.setenv(variable, os.fspath(value))
    assert backend.cuda_requirements() == []
    assert backend.cuda_requirements({"cmake.define.PAGEDKV_CUDA": "on"}) == []
    assert backend.cuda_requirements({"cmake.define.PAGEDKV_NVCC": "wheel"}) == WHEELS
    monkeypatch.setenv("PAGEDKV_NVCC", "wheel")
    assert backend.cuda_requirements() == WHEELS


def test_nvcc_in_the_usual_folder_is_found(backend, monkeypatch, toolkit):
    monkeypatch.setattr(backend, "SYSTEM_FOLDERS", [os.fspath(toolkit / "bin")])
    assert backend.cuda_requirements() == []


def test_a_home_without_nvcc_is_passed_over(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", os.fspath(tmp_path))
    assert backend.cuda_requirements() == WHEELS


def test_system_never_downloads(backend, monkeypatch):
    monkeypatch.setenv("PAGEDKV_NVCC", "system")
    assert backend.cuda_requirements() == []


@pytest.mark.parametrize("machine, wheels", [("x86_64", WHEELS), ("aarch64", WHEELS), ("riscv64", [])])
def test_wheels_exist_for_two_machines(backend, monkeypatch, machine, wheels):
    monkeypatch.setattr(backend.platform, "machine", lambda: machine)
    assert backend.cuda_requirements() == wheels


def test_other_systems_have_no_wheels(backend, monkeypatch):
    monkeypatch.setattr(backend.sys, "platform", "darwin")
    assert backend.cuda_requirements() == []
