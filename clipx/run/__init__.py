"""Run directory, lock, signal handling and watchdog of a run."""
