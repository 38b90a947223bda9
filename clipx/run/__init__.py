"""A run as a folder and as a process: its directory, lock, signals and watchdog."""
