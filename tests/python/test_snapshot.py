"""Snapshots through paths and Python's file objects; their exceptions come out as themselves."""

import io
import os
import pathlib
import resource

import pytest

import pagedkv


@pytest.fixture
def seq(cache):
    seq = cache.open(range(10), priority=4)
    seq.append(range(10))
    return seq


@pytest.fixture
def empty(layout):
    with pagedkv.Cache(layout, num_blocks=8, device="host") as empty:
        yield empty


def to_bytes(owner):
    file = io.BytesIO()
    owner.save(file)
    return file.getvalue()


@pytest.mark.parametrize("kind", [str, os.fsencode, pathlib.Path])
def test_paths(cache, empty, seq, tmp_path, kind):
    path = kind(str(tmp_path / "snapshot"))
    for owner in (seq, cache):
        owner.save(path)
        assert (tmp_path / "snapshot").read_bytes() == to_bytes(owner)
        assert os.listdir(tmp_path) == ["snapshot"]
    assert empty.load(path) == 2 and empty.load(path) == 0
    seq.save(path)  # over the other one
    assert os.listdir(tmp_path) == ["snapshot"]
    loaded = empty.load_sequence(path)
    assert (loaded.length, loaded.num_cached_tokens, loaded.priority) == (10, 8, 4)
    assert empty.load_sequence(path, namespace=1).priority == 4
    assert empty.check()


def test_a_file_that_goes_on(empty, seq, tmp_path):
    path = tmp_path / "snapshot"
    path.write_bytes(to_bytes(seq) + b"x")
    with pytest.raises(pagedkv.InvalidArgumentError, match="goes on"):
        empty.load_sequence(path)
    # A stream may hold one snapshot after another.
    file = io.BytesIO(to_bytes(seq) + to_bytes(seq) + b"x")
    for _ in range(2):
        assert empty.load_sequence(file).length == 10
    assert file.read() == b"x"


def test_paths_that_do_not_work(cache, seq, tmp_path, refuses):
    for path, text in ((tmp_path / "no" / "folder", "No such file"), (tmp_path, "directory"), ("", "No such file")):
        with refuses(cache, pagedkv.InvalidArgumentError if path != tmp_path else pagedkv.DeviceError, text):
            cache.load_sequence(path)
        with refuses(cache, pagedkv.InvalidArgumentError if path != tmp_path else pagedkv.DeviceError):
            seq.save(path) if path else cache.load("")
    with refuses(cache, pagedkv.InvalidArgumentError, "null"):
        cache.load("a\0b")
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_what_was_there(cache, seq, tmp_path, refuses):
    path = tmp_path / "snapshot"
    path.write_bytes(b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with refuses(cache, pagedkv.DeviceError, "File too large"):
            cache.save(path)
        with refuses(cache, pagedkv.DeviceError, "File too large"):
            seq.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["snapshot"]


class Broken:
    """A file that raises at the n-th call."""

    def __init__(self, data, error, num_good):
        self.file, self.error, self.num_good = io.BytesIO(data), error, num_good

    def count(self):
        self.num_good -= 1
        if self.num_good < 0:
            raise self.error

    def read(self, size):
        self.count()
        return self.file.read(size)

    def write(self, data):
        self.count()
        return self.file.write(data)


@pytest.mark.parametrize("error", [OSError("full"), KeyError(1), KeyboardInterrupt(), pagedkv.BusyError("mine")])
def test_exceptions_of_the_file(cache, empty, seq, error):
    for owner, load in ((seq, empty.load_sequence), (cache, empty.load)):
        data = to_bytes(owner)
        num_calls = 0
        while True:
            before = cache.stats()
            try:
                owner.save(Broken(b"", error, num_calls))
                break
            except type(error) as raised:
                assert raised is error
            assert cache.stats() == before
            num_calls += 1
        assert num_calls > 3
        num_calls = 0
        while True:
            before = empty.stats()
            try:
                load(Broken(data, error, num_calls))
                break
            except type(error) as raised:
                assert raised is error
            assert empty.stats() == before and empty.check()
            num_calls += 1
        assert num_calls > 3


class Stingy(io.BytesIO):
    """Takes and gives a few bytes at a time, as sockets and pipes do."""

    def read(self, size=-1):
        return super().read(min(size, 7))

    def write(self, data):
        return super().write(data[:5])


def test_short_reads_and_writes(empty, seq):
    file = Stingy()
    seq.save(file)
    assert file.getvalue() == to_bytes(seq)
    file.seek(0)
    assert empty.load_sequence(file, tag=7).tag == 7


def test_files_of_odd_behaviour(cache, empty, seq, refuses):
    class Mute:
        def write(self, data):
            self.size = getattr(self, "size", 0) + len(data)

    file = Mute()
    seq.save(file)
    assert file.size == len(to_bytes(seq))
    with pytest.raises(TypeError):
        seq.save(io.StringIO())
    with pytest.raises(TypeError):
        empty.load(io.StringIO("PKVSNAP" * 100))
    with refuses(empty, pagedkv.InvalidArgumentError, "ends early"):
        empty.load_sequence(io.BytesIO())
    with refuses(empty, pagedkv.InvalidArgumentError, "no snapshot"):
        empty.load(io.BytesIO(bytes(1000)))

    class Generous(io.BytesIO):
        def read(self, size=-1):
            return super().read(size + 1)

    with refuses(empty, pagedkv.InvalidArgumentError, "gave"):
        empty.load_sequence(Generous(to_bytes(seq)))

    class Refusing(io.BytesIO):
        def write(self, data):
            return 0

    with pytest.raises(OSError, match="took 0"):
        seq.save(Refusing())

    class Waiting(io.RawIOBase):
        def writable(self):
            return True

        def readable(self):
            return True

        def write(self, data):
            return None

        def read(self, size=-1):
            return None

    with pytest.raises(BlockingIOError):
        seq.save(Waiting())
    with pytest.raises(BlockingIOError):
        empty.load_sequence(Waiting())

    class Boasting(io.BytesIO):
        def write(self, data):
            return len(data) + 1

    with pytest.raises(OSError, match="took"):
        seq.save(Boasting())
    for bad in (None, 3, 1.5, object(), []):
        for call in (seq.save, cache.save, cache.load, cache.load_sequence):
            with refuses(cache, pagedkv.InvalidArgumentError, "file must be"):
                call(bad)
    for name, bad in (("namespace", -1), ("priority", 2**31), ("tag", "x")):
        with refuses(empty, pagedkv.InvalidArgumentError, name):
            empty.load_sequence(io.BytesIO(to_bytes(seq)), **{name: bad})


def test_a_file_that_calls_back(cache, empty, seq):
    """The cache is busy while a snapshot is on its way; what is dropped meanwhile is closed after it."""
    dropped = [cache.open([1, 2]), empty.open([1, 2])]

    class Meddling(io.BytesIO):
        def read(self, size=-1):
            dropped.clear()
            with pytest.raises(pagedkv.BusyError):
                empty.open([1])
            return super().read(size)

        def write(self, data):
            with pytest.raises(pagedkv.BusyError):
                cache.open([1])
            return super().write(data)

    file = Meddling()
    seq.save(file)
    file.seek(0)
    assert empty.load_sequence(file).length == 10
    assert empty.stats()["num_sequences"] == 0  # nobody kept it
    assert cache.stats()["num_sequences"] == 1


def test_closed_things(cache, empty, seq):
    data = io.BytesIO(to_bytes(seq))
    seq.close()
    with pytest.raises(pagedkv.NotFoundError):
        seq.save(io.BytesIO())
    empty.close()
    for call in (empty.save, empty.load, empty.load_sequence):
        with pytest.raises(pagedkv.InvalidArgumentError, match="closed"):
            call(data)
