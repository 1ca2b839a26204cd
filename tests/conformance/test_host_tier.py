"""The host tier: evicted blocks are found again with the K and V that they had."""
import numpy as np
import pytest

import pagedkv

from .caches import count_hit, count_states, ids, make_cache, make_layout, open_with, refused
from .marked import MarkedCache
from .places import arrays_at, device, find_place  # noqa: F401 (a fixture: every test runs over several devices, too)


def make_tiered(device, num_blocks, num_slots, **options):
    block_bytes = make_layout(device, options.get("block_size", 4)).block_bytes
    return make_cache(device, num_blocks, host_tier=num_slots * block_bytes, **options)


def make_marked(device, num_blocks, num_slots, **options):
    bytes_of = {"float32": 4, "bfloat16": 2, "float8_e4m3": 1, "int8": 1}
    plain = MarkedCache(device, 1, **{key: value for key, value in options.items()
                                      if key in ("block_size", "dtype", "kv_scales", "order")})
    assert bytes_of[plain.dtype]
    slot_bytes = sum(part["block_bytes"] for part in plain.cache.shards)
    return MarkedCache(device, num_blocks, host_tier=num_slots * slot_bytes, **options)


def test_an_evicted_prefix_is_restored(device):
    world = make_marked(device, 8, 16)
    prompt = list(range(1, 18))  # four full blocks and one token
    first = world.open_with(prompt)
    first.seq.close()
    assert world.cache.evict(8) == 4 and count_states(world.cache) == (8, 0, 0, 0)
    stats = world.cache.stats()
    assert stats["offloaded_blocks"] == 4 and stats["host_tier_resident"] == 4 and stats["host_tier_blocks"] == 16
    world.arrays.fill_blocks(world.cache, 0)
    second = world.open(prompt)
    assert second.seq.num_cached_tokens == 16
    world.check([second])
    assert count_states(world.cache) == (4, 0, 4, 0)
    world.step([(second, prompt[16:])])
    world.check([second])
    stats = world.cache.stats()
    assert stats["host_hit_tokens"] == 16 and stats["disk_hit_tokens"] == 0 and stats["restored_blocks"] == 4
    assert stats["hit_tokens"] == 16


def test_restored_blocks_are_found_on_the_device_and_kept_in_the_tier(device):
    world = make_marked(device, 8, 16)
    prompt = list(range(1, 18))
    world.open_with(prompt).seq.close()
    world.cache.evict(8)
    first, second = world.open(prompt), world.open(prompt)
    assert first.seq.blocks.tolist() == second.seq.blocks.tolist()
    first.seq.close()
    second.seq.close()
    assert world.cache.stats()["restored_blocks"] == 4
    world.cache.evict(8)  # nothing is copied twice
    assert world.cache.stats()["offloaded_blocks"] == 4
    third = world.open(prompt)
    world.check([third])
    assert world.cache.stats()["host_hit_tokens"] == 32


def test_a_prefix_may_lie_in_both_places(device):
    """The middle of a prefix is evicted, its ends are not."""
    world = make_marked(device, 8, 8, eviction="lfu")
    prompt = list(range(1, 26))  # six full blocks
    world.open_with(prompt).seq.close()
    for _ in range(3):
        world.open(prompt[:9]).seq.close()  # the first two are hit more often
    world.cache.evict(5)  # three of six go, last ones first
    pin = world.cache.pin(ids(prompt[:12]))
    assert count_states(world.cache)[2] == 3
    again = world.open(prompt)
    assert again.seq.num_cached_tokens == 24
    world.check([again])
    assert world.cache.stats()["host_hit_tokens"] == 12
    pin.close() if hasattr(pin, "close") else pin.unpin()


def test_too_few_blocks_make_the_hit_shorter(device):
    world = make_marked(device, 6, 16)
    prompt = list(range(1, 22))  # five full blocks
    world.open_with(prompt).seq.close()
    world.cache.evict(6)
    other = world.open_with([90, 91, 92, 93, 94])  # two blocks
    other.seq.reserve(4)  # and a third: three are left
    again = world.open(prompt)
    assert again.seq.num_cached_tokens == 12
    world.check([again, other])
    with pytest.raises(pagedkv.OutOfBlocksError):
        again.seq.append(ids(prompt[12:]))
    other.seq.close()
    assert again.seq.rematch(ids(prompt)) == 20
    world.check([world.adopt(again.seq, prompt)])


def test_hit_blocks_are_not_evicted_for_the_rest(device):
    world = make_marked(device, 4, 16)
    prompt = list(range(1, 18))  # four full blocks
    world.open_with(prompt[:16]).seq.close()
    other = world.open_with(range(50, 58))
    other.seq.close()  # evicted the tail of the first
    assert world.cache.stats()["offloaded_blocks"] == 2
    again = world.open(prompt)
    assert again.seq.num_cached_tokens == 16
    world.check([again])


def test_the_tier_gives_up_what_was_used_least_recently(device):
    world = make_marked(device, 8, 4)
    prompts = [[10 * i + j for j in range(9)] for i in range(1, 4)]  # two full blocks each
    for prompt in prompts[:2]:
        world.open_with(prompt).seq.close()
        world.cache.evict(8)
    world.open(prompts[0]).seq.close()  # used again
    world.cache.evict(8)
    world.open_with(prompts[2]).seq.close()
    world.cache.evict(8)
    assert world.cache.stats()["host_tier_evictions"] == 2 and world.cache.stats()["host_tier_resident"] == 4
    assert [world.cache.probe(ids(prompt)) for prompt in prompts] == [8, 0, 8]
    hits = [world.open(prompts[0]), world.open(prompts[2])]
    world.check(hits)


def test_one_slot(device):
    world = make_marked(device, 8, 1)
    world.open_with(range(1, 18)).seq.close()
    world.cache.evict(8)
    assert world.cache.stats()["host_tier_resident"] == 1
    world.check([])
    # Children go first, so it is the first block that came last.
    again = world.open(range(1, 18))
    assert again.seq.num_cached_tokens == 4
    world.check([again])


def test_open_many_restores_for_each(device):
    world = make_marked(device, 12, 16)
    prompts = [[100 * i + j for j in range(9)] for i in range(1, 5)]
    for prompt in prompts:
        world.open_with(prompt).seq.close()
    world.cache.evict(10)  # six of eight cached blocks
    seqs = world.cache.open_many([ids(prompt) for prompt in prompts])
    assert [seq.num_cached_tokens for seq in seqs] == [8, 8, 8, 8]
    world.check([world.adopt(seq, prompt) for seq, prompt in zip(seqs, prompts)])


def test_probe_finds_what_open_finds(device):
    cache = make_tiered(device, 8, 16)
    open_with(cache, range(20)).close()
    cache.evict(6)  # of five cached blocks three
    for length in range(24):
        assert cache.probe(ids(range(length))) == min(max(length - 1, 0) // 4 * 4, 20)
    assert cache.probe(ids(range(20)), namespace=1) == 0
    assert cache.stats()["restored_blocks"] == 0


def test_namespaces_keep_apart_and_are_forgotten(device):
    cache = make_tiered(device, 8, 16)
    for namespace in (1, 2):
        open_with(cache, range(9), namespace=namespace).close()
    cache.evict(8)
    assert count_hit(cache, range(9)) == 0 and count_hit(cache, range(9), namespace=1) == 8
    cache.evict(8)
    cache.invalidate(1)
    assert cache.stats()["host_tier_resident"] == 2
    assert count_hit(cache, range(9), namespace=1) == 0 and count_hit(cache, range(9), namespace=2) == 8
    cache.check()
    # The record of a namespace goes, its epoch does not.
    open_with(cache, range(9), namespace=1).close()
    cache.evict(8)
    assert count_hit(cache, range(9), namespace=1) == 8
    cache.check()


def test_salted_prefixes(device):
    cache = make_tiered(device, 16, 32)
    salts = [(8, 5)]
    open_with(cache, range(17), namespace=1, salts=salts).close()
    cache.evict(16)
    assert cache.probe(ids(range(17)), namespace=1) == 8
    assert cache.probe(ids(range(17)), namespace=1, salts=[(8, 6)]) == 8
    assert count_hit(cache, range(17), namespace=1, salts=salts) == 16
    cache.evict(16)
    cache.invalidate(5)
    assert count_hit(cache, range(17), namespace=1, salts=salts) == 8
    cache.evict(16)
    cache.invalidate(1)  # what passes through it goes too
    assert count_hit(cache, range(17), namespace=1, salts=salts) == 0
    cache.check()


def test_quotas_bound_what_is_restored(device):
    cache = make_tiered(device, 16, 32)
    open_with(cache, range(17), namespace=3).close()
    cache.evict(16)
    cache.set_quota(3, 3)
    seq = cache.open(ids(range(17)), namespace=3)
    assert seq.num_cached_tokens == 12
    assert cache.namespace_stats(3)["held_blocks"] == 3
    cache.check()
    seq.close()
    # Its own cached blocks give way for what is restored, and are found again themselves.
    cache.set_quota(3, 4)
    open_with(cache, range(50, 63), namespace=3).close()
    assert count_hit(cache, range(17), namespace=3) == 16
    cache.check()


def test_partial_reuse_goes_on_behind_what_is_restored(device):
    world = make_marked(device, 12, 16, partial_reuse=True)
    prompt = list(range(1, 18))
    world.open_with(prompt).seq.close()
    world.cache.evict(12)
    tail = world.open_with(prompt[:12] + [70, 71, 72, 73, 74])
    again = world.open(prompt[:12] + [70, 71, 99, 98])
    assert again.seq.num_cached_tokens == 14
    world.check([tail, again])
    tail.seq.close()
    again.seq.close()
    world.cache.evict(12)
    again = world.open(prompt[:12] + [70, 71, 72, 73, 74])
    assert again.seq.num_cached_tokens == 16
    world.check([again])


def test_events_tell_of_the_device(device):
    cache = make_tiered(device, 8, 16, event_capacity=100)
    open_with(cache, range(9)).close()
    stored = cache.read_events()
    cache.evict(8)
    removed = cache.read_events()
    seq = cache.open(ids(range(9)))
    restored = cache.read_events()
    assert removed["kind"].tolist() == [2, 2] and restored["kind"].tolist() == [1, 1]
    assert restored["hash"].tolist() == stored["hash"].tolist() and restored["parent"].tolist() == stored["parent"].tolist()
    seq.close()


def test_what_a_discarded_step_wrote_is_not_found(device):
    cache = make_tiered(device, 8, 16)
    seq = cache.open(ids([]))
    batch = cache.batch(max_sequences=4, max_tokens=64)
    batch.prepare([seq], [9], tokens=ids(range(9)))
    seq.close()
    cache.evict(8)
    assert cache.stats()["host_tier_resident"] == 2
    cache.discard(batch)
    assert cache.probe(ids(range(9))) == 0
    cache.check()


def test_reset_empties_the_tier(device):
    cache = make_tiered(device, 8, 16)
    open_with(cache, range(9)).close()
    cache.evict(8)
    cache.reset()
    assert cache.stats()["host_tier_resident"] == 0 and count_hit(cache, range(9)) == 0
    cache.check()


def test_blocks_that_were_hit_too_rarely_are_let_go(device):
    cache = make_tiered(device, 8, 16, tier_min_hits=1)
    open_with(cache, range(9)).close()
    open_with(cache, range(50, 59)).close()
    count_hit(cache, range(9))
    cache.evict(8)
    stats = cache.stats()
    assert stats["offloaded_blocks"] == 2 and stats["skipped_offloads"] == 2
    assert cache.probe(ids(range(9))) == 8 and cache.probe(ids(range(50, 59))) == 0
    cache.check()


def test_what_is_cheaper_to_compute_is_let_go(device):
    cache = make_tiered(device, 8, 64, recompute_tokens_per_second=1e15)
    for i in range(40):
        open_with(cache, range(100 * i, 100 * i + 9)).close()
        cache.evict(8)
        arrays_at(device).wait()  # a rate is known when its copy is over
    stats = cache.stats()
    # The first is copied to learn the rate; then one in 65 is, to learn whether it has changed.
    assert 2 <= stats["offloaded_blocks"] < 10 and stats["skipped_offloads"] == 80 - stats["offloaded_blocks"]
    assert stats["offload_rate"] > 0
    slow = make_tiered(device, 8, 64, recompute_tokens_per_second=1e-3)
    for i in range(4):
        open_with(slow, range(100 * i, 100 * i + 9)).close()
        slow.evict(8)
    assert slow.stats()["skipped_offloads"] == 0


def test_explain_says_where_else_a_block_is(device):
    cache = make_tiered(device, 8, 16)
    open_with(cache, range(9)).close()
    cache.evict(8)
    seq = cache.open(ids(range(9)))
    described = cache.explain(int(seq.blocks[0]))
    assert described["is_in_host_tier"] is True and described["is_in_disk_tier"] is False
    assert "is_in_host_tier" not in make_cache(device, 4).explain(0)


def test_statistics_as_text(device):
    cache = make_tiered(device, 8, 16)
    open_with(cache, range(9)).close()
    cache.evict(8)
    text = cache.stats_text()
    assert "pagedkv_offloaded_blocks_total 2\n" in text and "pagedkv_host_tier_resident_blocks 2\n" in text
    assert "pagedkv_is_disk_tier_on 0\n" in text


def test_options_are_checked(device):
    one = make_layout(device).block_bytes
    for wrong, word in [(dict(host_tier=one - 1), "less than one block"), (dict(host_tier="much"), "host_tier"),
                        (dict(host_tier=0), "at least one byte"), (dict(host_tier=1.5), "host_tier"),
                        (dict(host_tier=one, tier_min_hits=-1), "tier_min_hits"),
                        (dict(host_tier=one, recompute_tokens_per_second=-1.0), "recompute_tokens_per_second"),
                        (dict(host_tier=one, recompute_tokens_per_second=float("nan")), "recompute_tokens_per_second"),
                        (dict(disk_tier="x", disk_tier_bytes=1 << 20), "host tier"),
                        (dict(host_tier=one, disk_tier="x"), "disk_tier_bytes"),
                        (dict(host_tier=one, disk_tier_bytes=1 << 20), "disk_tier_path"),
                        (dict(host_tier=one, disk_tier="x", disk_tier_bytes=5000), "too little"),
                        (dict(host_tier=one, disk_tier=3, disk_tier_bytes=1 << 20), "disk_tier must be a path")]:
        with pytest.raises((pagedkv.InvalidArgumentError, TypeError), match=word):
            make_cache(device, 4, **wrong)
    with pytest.raises(pagedkv.OutOfMemoryError):
        make_cache(device, 4, host_tier=(1 << 31) * one if one > 1 << 20 else "4000TiB")


def test_a_recording_is_refused(device, tmp_path):
    cache = make_tiered(device, 8, 16)
    with refused(cache, pagedkv.UnsupportedError):
        cache.trace_start(tmp_path / "calls")


@pytest.mark.parametrize("dtype, kv_scales", [("bfloat16", "static"), ("int8", "token_head")])
def test_blocks_travel_whole(device, dtype, kv_scales):
    """Bit by bit, the scales in a block included."""
    world = make_marked(device, 8, 8, dtype=dtype, kv_scales=kv_scales)
    prompt = list(range(1, 18))
    first = world.open_with(prompt)
    before = world.arrays.read_blocks(world.cache)[first.seq.blocks[:4]]
    first.seq.close()
    world.cache.evict(8)
    world.arrays.fill_blocks(world.cache, 0)
    second = world.open(prompt)
    np.testing.assert_array_equal(world.arrays.read_blocks(world.cache)[second.seq.blocks], before)


@pytest.mark.parametrize("num_heads, dim, num_blocks", [(1, 8, 600), (1, 64, 600), (6, 64, 300), (16, 64, 257), (32, 128, 40)])
def test_blocks_of_any_size_travel_whole(device, num_heads, dim, num_blocks):
    """From 512 bytes to 256 KiB, more than one transfer of them: on a device small ones are copied in another way than
    large ones. What nobody asked for stays as it is."""
    count = len(find_place(device).get("devices", [0]))
    layout = pagedkv.Layout(num_layers=count, num_kv_heads=count * num_heads, head_dim=dim, dtype="bfloat16", block_size=16)
    cache = pagedkv.Cache(layout, num_blocks=num_blocks + 3, host_tier=num_blocks * layout.block_bytes, **find_place(device))
    memory = arrays_at(device)
    rng = np.random.default_rng(num_blocks)
    content = rng.integers(0, 256, (num_blocks + 3, layout.block_bytes), np.uint8)
    tokens = np.arange(16 * num_blocks + 1)
    first = open_with(cache, tokens[:-1])
    memory.write_blocks(cache, content)
    before = content[first.blocks]
    first.close()
    assert cache.evict(num_blocks + 3) == num_blocks
    memory.fill_blocks(cache, 7)
    second = cache.open(tokens)
    assert second.num_cached_tokens == 16 * num_blocks
    after = memory.read_blocks(cache)
    np.testing.assert_array_equal(after[second.blocks], before)
    assert (np.delete(after, second.blocks, axis=0) == 7).all()
    assert cache.check() and cache.stats()["restored_blocks"] == num_blocks
