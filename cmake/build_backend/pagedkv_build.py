"""PEP 517 backend: scikit-build-core, plus nvcc from PyPI when no CUDA compiler is at hand.

PAGEDKV_CUDA   auto (default): CUDA with the system's nvcc if there is one, else with the nvcc wheels, else host only
               on: as auto, but fail without a CUDA compiler        off: host only, nothing is downloaded
PAGEDKV_NVCC   auto (default), system or wheel: where nvcc comes from

Both are environment variables, or config settings (-C cmake.define.PAGEDKV_CUDA=off).
"""

from __future__ import annotations

import os
import platform
import shutil
import sys

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403  (the hooks that stay as they are)

# The lowest 13.x: PTX of a newer minor version does not load on the older drivers of the same major version.
# cccl is needed besides nvcc: cuda_fp16.h includes <nv/target>.
NVCC_REQUIREMENTS = ["cuda-toolkit[nvcc,cudart,cccl]==13.0.*"]

SYSTEM_FOLDERS = ["/usr/local/cuda/bin"]  # after PATH


def get_requires_for_build_wheel(config_settings=None):
    return _build.get_requires_for_build_wheel(config_settings) + cuda_requirements(config_settings)


def get_requires_for_build_editable(config_settings=None):
    return _build.get_requires_for_build_editable(config_settings) + cuda_requirements(config_settings)


def cuda_requirements(config_settings=None) -> list[str]:
    """The nvcc wheels if this build needs them, else nothing."""
    is_linux = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    if not is_linux or _setting(config_settings, "PAGEDKV_CUDA") in ("off", "0", "false", "no"):
        return []
    source = _setting(config_settings, "PAGEDKV_NVCC")
    if source == "system" or (source != "wheel" and find_system_nvcc()):
        return []
    return NVCC_REQUIREMENTS


def find_system_nvcc() -> str | None:
    """The nvcc that cmake/PagedkvCuda.cmake would find; the same places in the same order."""
    if os.environ.get("CUDACXX"):
        return os.environ["CUDACXX"]
    for variable in ("CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"):
        if os.environ.get(variable):
            path = shutil.which("nvcc", path=os.path.join(os.environ[variable], "bin"))
            if path:
                return path
    return shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS]))


def _setting(config_settings, name: str) -> str:
    for key in (f"cmake.define.{name}", f"skbuild.cmake.define.{name}"):
        if config_settings and key in config_settings:
            return str(config_settings[key]).lower()
    return os.environ.get(name, "auto").lower()
