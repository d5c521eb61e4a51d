"""Benchmarks that compare both sides, interleaved, in one run: machines are noisy, a ratio is not."""
