"""Measurements. Run as `python -m benchmarks.attention` and so on from the repository's root; see harness.py."""
