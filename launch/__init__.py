"""Runs and sweeps on clusters. The launchers' settings are in conf/hydra/launcher; `launch.status` shows a sweep."""
