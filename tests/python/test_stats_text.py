"""The statistics as JSON and in the Prometheus text format: they say what stats() says, and parse."""

import json
import re
import threading

import numpy as np
import pytest

import pagedkv


@pytest.fixture
def used(cache):
    """A cache that has been used: every count differs from 0 that easily does."""
    first = cache.open(np.arange(23))
    first.append(np.arange(23))
    second = cache.open(np.arange(23))
    second.append(np.arange(20, 23))
    child = second.fork()
    child.append([1])
    with pytest.raises(pagedkv.OutOfBlocksError):
        child.reserve(40)
    first.close()
    return cache, [second, child]


def parse(text):
    """A strict reading of the format 0.0.4: {metric: (kind, help, {(suffix, labels): value})}, in the order of the file."""
    assert text.endswith("\n") and not re.search(r"[^\x20-\x7e\n]", text)
    metrics = {}
    lines = text.split("\n")[:-1]
    name = kind = None
    while lines:
        line = lines.pop(0)
        if match := re.fullmatch(r"# HELP (\S+) (.+)", line):
            name, about = match.groups()
            kind = re.fullmatch(rf"# TYPE {name} (counter|gauge|histogram)", lines.pop(0))[1]
            assert name not in metrics
            metrics[name] = (kind, about, {})
            continue
        match = re.fullmatch(r"([a-z_]+?)(_bucket|_sum|_count|)(\{[a-z]+=\"[^\"]*\"\})? (-?[0-9]+)", line)
        assert match, line
        metric, suffix, labels, value = match.groups()
        if kind != "histogram":
            metric, suffix = metric + suffix, ""
        assert metric == name and (kind == "histogram") == bool(suffix)
        assert (suffix, labels) not in metrics[name][2]
        metrics[name][2][suffix, labels] = int(value)
    return metrics


# Statistics that are not under their own name, and what they are called.
TIER_COUNTERS = {"host_hit_tokens", "disk_hit_tokens", "tier_misses", "offloaded_blocks", "restored_blocks",
                 "skipped_offloads", "host_tier_evictions", "disk_writes", "disk_reads", "disk_drops", "disk_damaged"}
TIER_NAMES = {"host_tier_resident": "host_tier_resident_blocks", "offload_rate": "offload_bytes_per_second",
              "restore_rate": "restore_bytes_per_second", "disk_tier_resident": "disk_tier_resident_blocks",
              "disk_write_rate": "disk_write_bytes_per_second", "disk_read_rate": "disk_read_bytes_per_second"}
NAMES = {**TIER_NAMES, "num_transfers": "transfers", "registered": "registered_blocks", "num_events": "events",
         "device": "device_info"}
COUNTERS = {*TIER_COUNTERS, "queried_tokens", "hit_tokens", "appended_tokens", "registered", "evictions", "copies", "prepares",
            "refusals", "partial_hit_tokens", "released_blocks", "num_events", "dropped_events", "copied_bytes", "uploaded_bytes",
            "saved_bytes", "loaded_bytes", "moved_blocks"}


def test_json_is_stats(used):
    cache, _ = used
    assert json.loads(cache.stats_text("json")) == cache.stats()
    assert cache.stats()["hit_tokens"] == 20


def test_prometheus_says_what_stats_says(used):
    cache, _ = used
    stats, metrics = cache.stats(), parse(cache.stats_text())
    assert parse(cache.stats_text("prometheus")) == metrics
    for key, value in stats.items():
        if key == "base":
            continue
        name = "pagedkv_" + NAMES.get(key, key) + ("_total" if key in COUNTERS else "")
        kind, about, samples = metrics.pop(name)
        assert about[0] == about[0].upper() and about.endswith(".")
        if key == "device":
            assert (kind, samples) == ("gauge", {("", '{device="host"}'): 1})
        elif key == "reuse_distance":
            assert kind == "histogram"
        elif key == "device_free_bytes":
            assert kind == "gauge" and 0 < samples["", None] <= stats["device_total_bytes"]  # asked for the text
        else:
            assert kind == ("counter" if key in COUNTERS else "gauge")
            assert samples == {("", None): int(value)}
    assert not metrics  # nothing else


def test_histogram_is_cumulative(used):
    cache, _ = used
    distances = cache.stats()["reuse_distance"]
    _, _, samples = parse(cache.stats_text())["pagedkv_reuse_distance"]
    bounds = [str(2 ** (i + 1) - 1) for i in range(31)] + ["+Inf"]
    expected = {("_bucket", f'{{le="{bound}"}}'): sum(distances[: i + 1]) for i, bound in enumerate(bounds)}
    assert len(distances) == 32
    assert {key: value for key, value in samples.items() if key[0] == "_bucket"} == expected
    assert samples["_count", None] == sum(distances)
    low = sum(count * (2**i if i else 0) for i, count in enumerate(distances))
    assert low <= samples["_sum", None] <= 2 * low + distances[0]


def test_the_prometheus_client_reads_it(used):
    parser = pytest.importorskip("prometheus_client.parser")
    cache, _ = used
    families = {family.name: family for family in parser.text_string_to_metric_families(cache.stats_text())}
    assert families["pagedkv_hit_tokens"].type == "counter"
    assert families["pagedkv_hit_tokens"].samples[0].value == cache.stats()["hit_tokens"]
    assert families["pagedkv_reuse_distance"].type == "histogram"
    assert families["pagedkv_held_blocks"].samples[0].value == cache.stats()["held_blocks"]


@pytest.mark.parametrize("format", ["xml", "", None, 1, ["json"]])
def test_other_formats_are_refused(cache, refuses, format):
    with refuses(cache, text="format must be 'json' or 'prometheus'"):
        cache.stats_text(format)


def test_closed_cache(layout):
    cache = pagedkv.Cache(layout, num_blocks=4, device="host")
    cache.close()
    with pytest.raises(pagedkv.InvalidArgumentError, match="closed"):
        cache.stats_text()


def test_readers_beside_a_writer(cache):
    done, errors = threading.Event(), []

    def read():
        last = 0
        while not done.is_set():
            metrics = parse(cache.stats_text())
            now = metrics["pagedkv_appended_tokens_total"][2]["", None]
            blocks = sum(metrics[f"pagedkv_{name}_blocks"][2]["", None] for name in ("uncached", "cached", "held"))
            if now < last or blocks != cache.num_blocks:
                errors.append((last, now, blocks))
            last = now

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for round in range(200):
        with cache.open(np.arange(20) + round % 3) as sequence:
            sequence.append(np.arange(sequence.length, 20) + round % 3)
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
