# cython: language_level=3, binding=True
"""The tiers of a cache: their options, and waiting for them."""
import os

from pagedkv._arrays cimport as_double, as_int64, as_text, describe
from pagedkv._cache cimport Cache
from pagedkv._errors cimport check
from pagedkv._errors import InvalidArgumentError
from pagedkv._memory cimport as_bytes
from pagedkv.abi cimport PKV_OFF, PKV_ON, pkv_cache_flush_tiers, pkv_status


cdef bytes as_path(object path, str name):
    cdef bytes encoded
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise InvalidArgumentError(f"{name} must be a path, got {describe(path)}")
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InvalidArgumentError(f"{name} has a NUL in it: {path!r}")
    return encoded


cdef tuple set_tiers(pkv_cache_options *options, object host_tier, object disk_tier, object disk_tier_bytes,
                     object tier_identity, object recompute_tokens_per_second, object tier_min_hits,
                     object disk_tier_reset):
    cdef bytes path = None, identity = None
    if host_tier is not None:
        options.host_tier_bytes = as_bytes(host_tier, "host_tier")
    if disk_tier is not None:
        path = as_path(disk_tier, "disk_tier")
        options.disk_tier_path = path
        if disk_tier_bytes is None:
            raise InvalidArgumentError("disk_tier is given without disk_tier_bytes")
    if disk_tier_bytes is not None:
        options.disk_tier_bytes = as_bytes(disk_tier_bytes, "disk_tier_bytes")
    if tier_identity is not None:
        identity = as_text(tier_identity, "tier_identity")
        options.tier_identity = identity
    options.recompute_tokens_per_second = as_double(recompute_tokens_per_second, "recompute_tokens_per_second")
    options.tier_min_hits = as_int64(tier_min_hits, "tier_min_hits")
    options.disk_tier_reset = PKV_ON if disk_tier_reset else PKV_OFF
    return path, identity


def flush_tiers(Cache self):
    """Returns when what was offloaded is in the host tier, and what is findable there is written to the disk tier.
    DeviceError if the disk tier was switched off by an error."""
    cdef pkv_status status
    self.enter()
    self._is_busy = True
    with nogil:
        status = pkv_cache_flush_tiers(self._cache)
    self._is_busy = False
    check(status)
