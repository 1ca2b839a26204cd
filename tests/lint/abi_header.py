"""Reads the declarations of include/pagedkv/pagedkv.h: enough of C for that one file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "include" / "pagedkv" / "pagedkv.h"


@dataclass
class Declarations:
    functions: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name -> result type, argument types
    structs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # name -> (type, field), empty if opaque
    enums: dict[str, list[str]] = field(default_factory=dict)


def split_declarator(text: str) -> tuple[str, str]:
    """"const char *name[4]" -> ("const char*[4]", "name"); the name may be missing: "void *" -> ("void*", "")."""
    text = re.sub(r"\s*\*\s*", "*", " ".join(text.split()))
    array = "".join(re.findall(r"\[\w+\]", text))
    text = re.sub(r"\[\w+\]", "", text)
    match = re.fullmatch(r"((?:const )?\w+(?:\*const|\*| )*)(\w*)", text)
    if match is None or (not match[2] and not text):
        raise ValueError(f"not a declarator: {text!r}")
    base, name = match[1], match[2]
    if not name and not base.endswith("*") and " " in base and not base.startswith("const "):
        base, name = base.rsplit(" ", 1)
    return base.strip() + array, name


def parse_fields(text: str) -> list[tuple[str, str]]:
    """"uint64_t a, b; char c[4];" -> (type, name) of each. A type that is a pointer declares one name only."""
    fields = []
    for declaration in filter(None, (part.strip() for part in text.split(";"))):
        first, *more = declaration.split(",")
        kind, name = split_declarator(first)
        fields.append((kind, name))
        fields += [(kind, other.strip()) for other in more]
    return fields


def parse_function(text: str) -> tuple[str, tuple[str, ...]]:
    """"int f(char *a)" -> ("f", ("int", "char*"))."""
    head, arguments = re.fullmatch(r"([^(]+)\((.*)\)", " ".join(text.split())).groups()
    result, name = split_declarator(head)
    kinds = [split_declarator(argument)[0] for argument in arguments.split(",") if argument.strip() not in ("", "void")]
    return name, (result, *kinds)


def read_header(path: Path = HEADER) -> Declarations:
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"^\s*#.*(?:\\\n.*)*$", "", text, flags=re.MULTILINE)
    found = Declarations()
    for name, body in re.findall(r"typedef enum (\w+) \{(.*?)\}", text, flags=re.DOTALL):
        found.enums[name] = re.findall(r"\b(PKV_\w+)\b\s*=", body)
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\}", text, flags=re.DOTALL):
        found.structs[name] = parse_fields(body)
    for name in re.findall(r"typedef struct (\w+) \w+;", text):
        found.structs[name] = []
    for declaration in re.findall(r"PKV_API\s+([^;]+);", text):
        name, kinds = parse_function(declaration)
        found.functions[name] = kinds
    return found
