"""`pagedkv info`: versions, devices, and whether CUDA works here or why not."""

import platform

import numpy as np

from pagedkv.cli.report import format_bytes, format_rows


def collect_info():
    """What the JSON has. A device that cannot be asked has an `error` in place of its facts."""
    import pagedkv

    cuda = pagedkv.cuda_info()
    names = ["host", *(f"cuda:{i}" for i in range(cuda["num_devices"] if cuda["is_usable"] else 0))]
    return {
        "version": pagedkv.version(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "library": _find(pagedkv.get_library),
        "auto": _ask(pagedkv, "auto").get("device"),
        "devices": [_ask(pagedkv, name) for name in names],
        "host": {"isa": pagedkv.isa(), "num_threads": pagedkv.num_threads()},
        "cuda": cuda,
    }


def _ask(pagedkv, name):
    try:
        return pagedkv.device_info(name)
    except pagedkv.PagedKVError as error:
        return {"device": name, "error": str(error)}


def _find(get_path):
    try:
        return get_path()
    except FileNotFoundError:
        return None


def format_info(info):
    cuda = info["cuda"]
    rows = [
        ("pagedkv", f"{info['version']}, {info['library'] or 'library not found'}"),
        ("python", f"{info['python']}, numpy {info['numpy']}, {info['platform']}"),
        ("host kernels", f"{info['host']['isa']}, {info['host']['num_threads']} threads"),
        ("cuda", "not built" if not cuda["is_built"] else f"built with {_version(cuda['built_version'])}"),
        ("", "usable" if cuda["is_usable"] else f"not usable: {cuda['reason'] or 'no reason given'}"),
    ]
    if cuda["driver_version"]:
        rows.append(("", f"driver supports {_version(cuda['driver_version'])}, {cuda['num_devices']} devices"))
    rows += [("device" if i == 0 else "", _describe(device)) for i, device in enumerate(info["devices"])]
    rows.append(("auto", f"{info['auto']}"))
    return "\n".join(format_rows(rows, 0))


def _describe(device):
    if "error" in device:
        return f"{device['device']}: {device['error']}"
    unit = "threads" if device["device"] == "host" else "multiprocessors"
    capability = device["compute_capability"]
    return ", ".join([
        f"{device['device']}: {device['name']}",
        *([f"compute capability {capability // 10}.{capability % 10}"] if capability else []),
        f"{device['num_processors']} {unit}",
        f"{format_bytes(device['free_bytes'])} of {format_bytes(device['total_bytes'])} free",
    ])


def _version(number):
    """CUDA's 1000 * major + 10 * minor."""
    return f"{number // 1000}.{number % 1000 // 10}"
