"""What scripts/bench_* call: measurements that say what was measured, on what, and with which versions."""
