"""Where the real data stands: $PAGEDKV_TEST_DATA, else shared/data beside the repository or beside its parent."""
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]


def find_test_data():
    """The folder, or None."""
    named = os.environ.get("PAGEDKV_TEST_DATA")
    beside = [above / "shared" / "data" for above in (ROOT.parent, ROOT.parent.parent)]
    candidates = [pathlib.Path(named)] if named else beside
    return next((path for path in candidates if path.is_dir()), None)


TEST_DATA = find_test_data()
