"""Caches over several devices. Nothing here is called from Python."""
