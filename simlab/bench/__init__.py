"""Benchmarks of the replayer: generated traces, hand-written loops to compare with, timings, a history."""
