"""The disk tier: blocks outlive the host tier, the cache and the process; what is damaged is a miss."""
import os
import resource
import signal
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

import pagedkv

from .caches import count_hit, ids, open_with
from .places import SHARDED, device  # noqa: F401 (a fixture: every test runs over several devices, too)
from .test_host_tier import make_marked, make_tiered

HEADER_BYTES = 4096


@pytest.fixture
def path(tmp_path):
    return tmp_path / "blocks.tier"


def make_disk(device, path, num_blocks=8, num_slots=16, size=1 << 20, **options):
    return make_marked(device, num_blocks, num_slots, disk_tier=path, disk_tier_bytes=size, **options)


def fill(world, num_prompts, start=0):
    """Prompts of two full blocks each, written, evicted and on the disk."""
    prompts = [[1000 * (start + i) + j for j in range(9)] for i in range(1, num_prompts + 1)]
    for prompt in prompts:
        world.open_with(prompt).seq.close()
        world.cache.evict(world.cache.num_blocks)
        world.cache.flush_tiers()
    return prompts


def reopen(device, path, world, **options):
    """Another cache on the same file, which knows what K and V ought to be."""
    again = make_disk(device, path, **options)
    again._rows = world._rows
    return again


def slot_bytes_of(world):
    header = -(-(64 + 8 * world.block_size) // 64) * 64
    return -(-(header + world.format.block_bytes) // 4096) * 4096


def test_what_the_host_tier_gave_up_is_read(device, path):
    world = make_disk(device, path, num_slots=4)
    prompts = fill(world, 4)
    stats = world.cache.stats()
    assert stats["disk_writes"] == 8 and stats["disk_tier_resident"] == 8 and stats["host_tier_resident"] == 4
    assert stats["is_disk_tier_on"] is True and stats["disk_drops"] == 0
    hits = [world.open(prompt) for prompt in prompts]
    assert [hit.seq.num_cached_tokens for hit in hits] == [8] * 4
    world.check(hits)
    stats = world.cache.stats()
    assert stats["disk_hit_tokens"] + stats["host_hit_tokens"] == 32 and stats["disk_reads"] == stats["disk_hit_tokens"] / 4 > 0


def test_a_later_process_finds_them(device, path):
    world = make_disk(device, path)
    prompts = fill(world, 3)
    world.cache.close()
    assert path.stat().st_size == HEADER_BYTES + 6 * slot_bytes_of(world)
    assert path.stat().st_mode & 0o777 == 0o600
    again = reopen(device, path, world)
    assert again.cache.stats()["disk_tier_resident"] == 6
    assert [again.cache.probe(ids(prompt)) for prompt in prompts] == [8] * 3
    hits = [again.open(prompt) for prompt in prompts]
    assert [hit.seq.num_cached_tokens for hit in hits] == [8] * 3
    again.check(hits)
    assert again.cache.stats()["disk_hit_tokens"] == 24
    assert again.cache.explain(int(hits[0].seq.blocks[0]))["is_in_disk_tier"] is True


@pytest.mark.parametrize("dtype, kv_scales, order", [("float32", "static", "token_head"), ("int8", "token_head", "head_token")])
@pytest.mark.parametrize("first, second", [("host", SHARDED[0]), (SHARDED[0], SHARDED[1]), (SHARDED[1], "host")])
def test_a_file_is_of_the_whole_model(path, first, second, dtype, kv_scales, order):
    """Written over some devices and read over others."""
    options = {"dtype": dtype, "kv_scales": kv_scales, "order": order}
    world = make_disk(first, path, **options)
    prompts = fill(world, 3)
    written = [(k.copy(), v.copy()) for k, v in world.gather([world.open(prompt).seq for prompt in prompts])]
    world.cache.close()
    again = make_disk(second, path, **options)
    hits = [again.cache.open(ids(prompt)) for prompt in prompts]
    assert [hit.num_cached_tokens for hit in hits] == [8] * 3 and again.cache.stats()["disk_hit_tokens"] == 24
    for (k, v), (there_k, there_v) in zip(written, again.gather(hits)):
        np.testing.assert_array_equal(k, there_k)
        np.testing.assert_array_equal(v, there_v)
    again.cache.check()


def test_its_own_name_of_the_seed(device, path):
    """A seed that was given is the file's; another one starts it anew."""
    world = make_disk(device, path, hash_seed=5)
    prompts = fill(world, 1)
    world.cache.close()
    again = reopen(device, path, world, hash_seed=5)
    assert again.cache.probe(ids(prompts[0])) == 8
    again.cache.close()
    again = reopen(device, path, world)
    assert again.cache.probe(ids(prompts[0])) == 8
    again.cache.close()
    again = reopen(device, path, world, hash_seed=6)
    assert again.cache.probe(ids(prompts[0])) == 0 and again.cache.stats()["is_disk_tier_on"] is True
    again.check([])


def test_least_recently_used_slots_are_overwritten(device, path):
    world = make_disk(device, path, num_slots=8)
    size = HEADER_BYTES + 4 * slot_bytes_of(world)
    world.cache.close()
    path.unlink()
    world = make_disk(device, path, num_slots=2, size=size)
    prompts = fill(world, 3)
    assert world.cache.stats()["disk_tier_blocks"] == 4 and world.cache.stats()["disk_tier_resident"] == 4
    assert [world.cache.probe(ids(prompt)) for prompt in prompts] == [0, 8, 8]
    world.check([world.open(prompts[1]), world.open(prompts[2])])
    world.cache.close()
    assert path.stat().st_size == size
    again = reopen(device, path, world, size=size - slot_bytes_of(world))  # a smaller file: its end goes
    assert again.cache.stats()["disk_tier_blocks"] == 3 and path.stat().st_size <= size - slot_bytes_of(world)
    again.check([again.open(prompt) for prompt in prompts])


def test_every_flipped_byte_is_noticed(device, path):
    world = make_disk(device, path)
    prompts = fill(world, 1)
    world.cache.close()
    whole = path.read_bytes()
    slot_bytes, block_bytes = slot_bytes_of(world), world.format.block_bytes
    rng = np.random.default_rng(11)
    used = list(range(80)) + [96 + block_bytes - 1] + rng.integers(80, 96 + block_bytes, 20).tolist()
    for offset in used:
        damaged = bytearray(whole)
        damaged[HEADER_BYTES + offset] ^= 1 << int(rng.integers(8))  # in the first slot: the last block of the prompt
        path.write_bytes(damaged)
        again = reopen(device, path, world)
        hit = again.open(prompts[0])
        assert hit.seq.num_cached_tokens in (0, 4), offset
        again.check([hit])
        again.cache.close()
        path.write_bytes(whole)
    again = reopen(device, path, world)
    assert again.open(prompts[0]).seq.num_cached_tokens == 8
    assert slot_bytes >= 96 + block_bytes


def test_a_damaged_header(device, path):
    world = make_disk(device, path)
    prompts = fill(world, 1)
    world.cache.close()
    whole = path.read_bytes()
    for offset in (12, 16, 20, 40, 50, 70, 4000):
        damaged = bytearray(whole)
        damaged[offset] ^= 4
        path.write_bytes(damaged)
        again = reopen(device, path, world)
        assert again.cache.probe(ids(prompts[0])) == 0 and again.cache.stats()["is_disk_tier_on"] is True
        again.check([])
        again.cache.close()


@pytest.mark.parametrize("keep", [0, 5, 4095, 4096, 4097, 5000, 8191, 8192, 10000])
def test_a_file_that_was_cut(device, path, keep):
    world = make_disk(device, path)
    prompts = fill(world, 3)
    world.cache.close()
    os.truncate(path, keep)
    again = reopen(device, path, world)
    assert again.cache.stats()["is_disk_tier_on"] is True
    hits = [again.open(prompt) for prompt in prompts]
    again.check(hits)
    for hit, prompt in zip(hits, prompts):
        again.step([(hit, prompt[hit.seq.length:])])
        hit.seq.close()
    again.cache.evict(again.cache.num_blocks)
    again.cache.flush_tiers()
    again.check([again.open(prompt) for prompt in prompts])


@pytest.fixture
def messages():
    lines = []
    pagedkv.set_log_callback(lambda level, message: lines.append(message))
    yield lines
    pagedkv.set_log_callback(None)


def goes_on_without(world, messages, word):
    """The cache works, without its disk tier, and has said so."""
    assert world.cache.stats()["is_disk_tier_on"] is False
    assert any(word in message for message in messages), messages
    marked = world.open_with(range(1, 14))
    marked.seq.close()
    world.cache.evict(8)
    world.check([world.open(range(1, 14))], atol=0.02)
    with pytest.raises(pagedkv.DeviceError) if world.cache.stats()["disk_tier_blocks"] else no_error():
        world.cache.flush_tiers()


class no_error:
    def __enter__(self):
        pass

    def __exit__(self, *exception):
        pass


def test_files_that_are_not_ours_stay(device, path, messages):
    for contents in (b"my diary\n", b"x" * 10000):
        path.write_bytes(contents)
        goes_on_without(make_disk(device, path), messages, "no file of a disk tier")
        assert path.read_bytes() == contents
        messages.clear()


def test_another_layout_or_identity(device, path, messages):
    world = make_disk(device, path, tier_identity="model a")
    prompts = fill(world, 1)
    world.cache.close()
    whole = path.read_bytes()
    for options in (dict(tier_identity="model b"), dict(), dict(tier_identity="model a", block_size=8),
                    dict(tier_identity="model a", dtype="bfloat16"),
                    dict(tier_identity="model a", order="head_token")):
        goes_on_without(make_disk(device, path, **options), messages, "another layout or identity")
        assert path.read_bytes() == whole
        messages.clear()
    again = reopen(device, path, world, tier_identity="model a")
    assert again.cache.probe(ids(prompts[0])) == 8


def test_a_later_version(device, path, messages):
    world = make_disk(device, path)
    fill(world, 1)
    world.cache.close()
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    goes_on_without(make_disk(device, path), messages, "version 2")


def test_one_cache_at_a_time(device, path, messages):
    world = make_disk(device, path)
    goes_on_without(make_disk(device, path), messages, "in use by another cache")
    fill(world, 1)
    assert world.cache.stats()["is_disk_tier_on"] is True


def test_places_where_no_file_can_be(device, tmp_path, messages):
    (tmp_path / "a folder").mkdir()
    for place, word in ((tmp_path / "missing" / "file", "No such file"), (tmp_path / "a folder", "directory"),
                        ("/dev/null", "no regular file")):
        goes_on_without(make_disk(device, place), messages, word)
        messages.clear()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(device, tmp_path, messages):
    tmp_path.chmod(0o500)
    try:
        goes_on_without(make_disk(device, tmp_path / "file"), messages, "Permission denied")
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk(device, path, messages):
    """The limit on the size of files stands in for it: writes fail in the same way."""
    world = make_disk(device, path)
    prompts = fill(world, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
    try:
        world.open_with(range(1, 18)).seq.close()
        world.cache.evict(8)
        with pytest.raises(pagedkv.DeviceError):
            world.cache.flush_tiers()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    goes_on_without(world, messages, "switched off")
    world.cache.close()
    again = reopen(device, path, world)
    again.check([again.open(prompts[0]), again.open(range(1, 18))])


def test_a_file_that_cannot_be_read(device, path, messages):
    world = make_disk(device, path, num_slots=2)
    prompts = fill(world, 3)
    os.truncate(path, HEADER_BYTES)  # behind its back
    hits = [world.open(prompt) for prompt in prompts]
    assert [hit.seq.num_cached_tokens for hit in hits[:2]] == [0, 0]  # the last one may be in the host tier
    world.check(hits)
    assert world.cache.stats()["disk_damaged"] > 0


def test_invalidate_reaches_the_file(device, path):
    world = make_disk(device, path)
    for namespace in (1, 2):
        world.open_with(range(1, 10), namespace=namespace).seq.close()
    world.cache.evict(8)
    world.cache.flush_tiers()
    world.cache.invalidate(1)
    assert world.cache.stats()["disk_tier_resident"] == 2
    world.open_with(range(1, 10), namespace=1).seq.close()  # under its second epoch
    world.cache.evict(8)
    world.cache.flush_tiers()
    assert world.cache.stats()["disk_tier_resident"] == 4
    world.cache.close()
    again = reopen(device, path, world)
    assert again.cache.probe(ids(range(1, 10)), namespace=2) == 8
    assert again.cache.probe(ids(range(1, 10)), namespace=1) == 0
    again.check([again.open(range(1, 10), namespace=2)])


def test_invalidate_of_a_namespace_that_others_pass_through(device, path):
    world = make_disk(device, path)
    salts = [(4, 5)]
    world.open_with(range(1, 10), namespace=1, salts=salts).seq.close()
    world.cache.evict(8)
    world.cache.flush_tiers()
    world.cache.close()
    again = reopen(device, path, world)
    assert again.cache.probe(ids(range(1, 10)), namespace=1, salts=salts) == 8
    again.cache.invalidate(1)  # this process has not seen the salts
    again.cache.close()
    again = reopen(device, path, world)
    assert again.cache.probe(ids(range(1, 10)), namespace=1, salts=salts) == 0
    assert again.cache.stats()["disk_tier_resident"] == 0


def test_reset(device, path):
    world = make_disk(device, path)
    prompt = fill(world, 1)[0]
    world.cache.reset()
    assert world.cache.probe(ids(prompt)) == 8  # the file stays
    world.cache.close()
    world = reopen(device, path, world, disk_tier_reset=True)
    assert world.cache.probe(ids(prompt)) == 8
    world.cache.reset()
    assert world.cache.probe(ids(prompt)) == 0
    world.cache.close()
    assert reopen(device, path, world).cache.probe(ids(prompt)) == 0


def test_what_a_discarded_step_wrote_is_not_in_the_file(device, path):
    cache = make_tiered(device, 8, 16, disk_tier=path, disk_tier_bytes=1 << 20)
    seq = cache.open(ids([]))
    batch = cache.batch(max_sequences=4, max_tokens=64)
    batch.prepare([seq], [9], tokens=ids(range(9)))
    seq.close()
    cache.evict(8)
    cache.flush_tiers()
    cache.discard(batch)
    cache.close()
    cache = make_tiered(device, 8, 16, disk_tier=path, disk_tier_bytes=1 << 20)
    assert cache.probe(ids(range(9))) == 0


def test_preempted_sequences_and_the_file(device, path):
    world = make_disk(device, path, num_slots=4)
    marked = world.open_with(range(1, 15))
    marked.seq.offload()
    world.cache.flush_tiers()
    fill(world, 1)  # one slot is left for it
    marked.seq.restore()
    world.check([marked])
    world.cache.close()
    again = reopen(device, path, world)
    assert again.cache.probe(ids(range(1, 15))) == 12  # full blocks alone
    again.check([again.open(range(1, 15))])


CHILD = """
import sys, numpy
sys.path.insert(0, sys.argv[2])
from conformance.test_disk_tier import make_disk
world = make_disk("host", sys.argv[1], num_slots=64, size=1 << 22)
i = 0
while True:
    i += 1
    print(i, world.cache.stats()["disk_writes"], flush=True)
    world.open_with([1000 * (i % 400) + j for j in range(9)]).seq.close()
    world.cache.evict(8)
"""


def number_rows(world, prompt):
    # Rows depend on the order in which prefixes are seen first: as in the child.
    return [world.rows_of(prompt[:i + 1]) for i in range(len(prompt))]


@pytest.mark.parametrize("num_writes", [5, 50, 300])
def test_after_a_kill_surviving_blocks_load(path, num_writes):
    """In the middle of writing, most likely; what it had written before is there."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), tests], stdout=subprocess.PIPE, text=True)
    while int(child.stdout.readline().split()[1]) < num_writes:
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    world = make_disk("host", path, num_slots=64, size=1 << 22)
    assert world.cache.stats()["is_disk_tier_on"] is True
    num_hit = 0
    for i in range(1, 401):
        prompt = [1000 * (i % 400) + j for j in range(9)]
        number_rows(world, prompt)
        hit = world.open(prompt)
        num_hit += hit.seq.num_cached_tokens > 0
        world.check([hit])
        hit.seq.close()
    assert num_hit >= min(num_writes // 2 - 1, 100)


def test_statistics_while_it_writes(device, path):
    """Any thread may ask; the writer is another one."""
    world = make_disk(device, path, num_slots=32)
    is_over = threading.Event()
    seen = []

    def ask():
        while not is_over.is_set():
            seen.append(world.cache.stats()["disk_writes"])

    thread = threading.Thread(target=ask)
    thread.start()
    fill(world, 20)
    is_over.set()
    thread.join()
    assert seen == sorted(seen)
    world.check([])


def test_the_format_is_the_documented_one(path):
    """docs/tiers.md, byte by byte, by another implementation."""
    world = make_disk("host", path, hash_seed=77, tier_identity="a model")
    prompt = fill(world, 1)[0]
    first = world.open(prompt)
    block = np.asarray(world.cache)[first.seq.blocks[0]].tobytes()
    world.cache.check()
    first.seq.close()
    data = path.read_bytes()
    magic, version, header_crc, flags, block_size, block_bytes, slot_bytes, seed = struct.unpack_from("<8sIIIIQQQ", data)
    assert (magic, version, flags, block_size) == (b"PKVTIER\0", 1, 0, 4)
    assert (block_bytes, slot_bytes, seed) == (world.format.block_bytes, slot_bytes_of(world), 77)
    assert header_crc == crc32c(data[16:4096])
    for slot, tokens in ((1, prompt[:4]), (0, prompt[4:8])):  # children are evicted first
        start = 4096 + slot * slot_bytes
        magic, slot_crc, data_crc, epoch, serial, namespace = struct.unpack_from("<4sIIIQQ", data, start)
        assert (magic, epoch, serial, namespace) == (b"PKVS", 0, slot + 1, 0)
        assert list(struct.unpack_from("<4q", data, start + 64)) == tokens
        assert slot_crc == crc32c(data[start + 8:start + 128])
        assert data_crc == crc32c(data[start + 128:start + 128 + block_bytes])
        if slot == 1:
            assert data[start + 128:start + 128 + block_bytes] == block


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff


def test_hits_count_where_they_came_from(device, path):
    world = make_disk(device, path, num_slots=2)
    prompts = fill(world, 2)
    assert count_hit(world.cache, prompts[0]) == 8
    stats = world.cache.stats()
    assert stats["disk_hit_tokens"] == 8 and stats["host_hit_tokens"] == 0
    open_with(world.cache, [5, 6, 7]).close()
    assert world.cache.stats()["tier_misses"] == 2
