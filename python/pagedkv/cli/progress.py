"""A progress bar on stderr, where that is a terminal: tqdm if it is installed, else a plain percentage."""

import sys
import time


def make_progress(total, unit, stream=None):
    """Something with update(done) and close(), or None where nobody watches."""
    stream = stream or sys.stderr
    if total <= 0 or not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return PlainProgress(total, unit, stream)
    return TqdmProgress(tqdm(total=total, unit=f" {unit}", file=stream, leave=False, dynamic_ncols=True))


class TqdmProgress:
    def __init__(self, bar):
        self._bar = bar

    def update(self, done):
        self._bar.update(done - self._bar.n)

    def close(self):
        self._bar.close()


class PlainProgress:
    """One line, rewritten a few times a second and cleared at the end."""

    _INTERVAL = 0.2  # seconds

    def __init__(self, total, unit, stream):
        self._total = total
        self._unit = unit
        self._stream = stream
        self._shown = 0.0

    def update(self, done):
        now = time.monotonic()
        if now - self._shown < self._INTERVAL:
            return
        self._shown = now
        self._stream.write(f"\r{100 * done // self._total:3d} %  {done:,} of {self._total:,} {self._unit}")
        self._stream.flush()

    def close(self):
        self._stream.write("\r\x1b[K")
        self._stream.flush()
