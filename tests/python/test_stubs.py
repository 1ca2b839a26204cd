"""The stubs say what the modules hold: names, parameters and defaults."""

import ast
import importlib
import inspect
import pathlib

import pytest

import pagedkv

MODULES = ["_errors", "_pool", "_layout", "_cache", "_sequence", "_pin", "_batch", "_attention"]
FOLDERS = [pathlib.Path(folder) for folder in pagedkv.__path__]
# Written by Python or Cython themselves.
ORDINARY = {
    "__new__", "__init__", "__repr__", "__reduce__", "__reduce_cython__", "__setstate_cython__", "__pyx_vtable__",
    "__doc__", "__module__", "__weakref__", "__dict__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    "__pyx_capi__", "__getstate__", "__setstate__", "__release_buffer__", "__buffer__", "__static_attributes__",
    "__firstlineno__",
}  # fmt: skip


def read_stub(module):
    for folder in FOLDERS:
        path = folder / f"{module}.pyi"
        if path.exists():
            return ast.parse(path.read_text())
    raise FileNotFoundError(f"{module}.pyi is not in {FOLDERS}")


def names_of(body):
    return {item.name for item in body if isinstance(item, (ast.ClassDef, ast.FunctionDef))}


def parameters_of(function):
    """[(name, default as source, or None)]"""
    arguments = function.args.args
    defaults = [ast.unparse(default) for default in function.args.defaults]
    defaults = [None] * (len(arguments) - len(defaults)) + defaults
    return [(argument.arg, default) for argument, default in zip(arguments, defaults)]


def runtime_parameters_of(function):
    return [
        (name, None if parameter.default is parameter.empty else repr(parameter.default))
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def test_the_package_is_typed():
    assert any((folder / "py.typed").exists() for folder in FOLDERS)


OTHER_MODULES = ["_adopted", "_arrays", "_dlpack", "_events", "_monitor", "_planes", "_prompt", "_resize", "_snapshot", "_tensors",
                 "_transfer", "_views"]


@pytest.mark.parametrize("module", [*MODULES, *OTHER_MODULES])
def test_every_module_has_a_stub(module):
    assert read_stub(module)
    assert importlib.import_module(f"pagedkv.{module}").__doc__


@pytest.mark.parametrize("module", MODULES)
def test_names(module):
    loaded = importlib.import_module(f"pagedkv.{module}")
    homes = {f"pagedkv.{module}"} | ({"pagedkv"} if module == "_errors" else set())
    own = {
        name
        for name, value in vars(loaded).items()
        if not name.startswith("__") and callable(value) and getattr(value, "__module__", None) in homes
    }
    stub = names_of(read_stub(module).body)
    assert stub == own


@pytest.mark.parametrize("module", MODULES)
def test_members_and_parameters(module):
    loaded = importlib.import_module(f"pagedkv.{module}")
    for item in read_stub(module).body:
        if isinstance(item, ast.FunctionDef):
            assert parameters_of(item) == runtime_parameters_of(getattr(loaded, item.name))
        if not isinstance(item, ast.ClassDef) or module == "_errors":
            continue
        kind = getattr(loaded, item.name)
        members = {name for name in vars(kind) if name not in ORDINARY}
        assert names_of(item.body) - ORDINARY == members - ORDINARY, item.name
        for member in item.body:
            is_property = any(ast.unparse(decorator) == "property" for decorator in member.decorator_list)
            if member.name == "__init__":
                expected = [pair for pair in parameters_of(member) if pair[0] != "self"]
                if member.args.defaults and item.name != "Batch":
                    assert expected == runtime_parameters_of(kind), item.name
            elif not is_property and not member.name.startswith("__") and not member.decorator_list:
                assert parameters_of(member) == runtime_parameters_of(getattr(kind, member.name)), member.name
            if is_property:
                assert not callable(getattr(kind, member.name)), member.name


def test_public_names():
    assert set(pagedkv.__all__) <= set(dir(pagedkv))
    for name in pagedkv.__all__:
        assert getattr(pagedkv, name).__doc__, name
