"""Runs and sweeps on clusters and on this machine: `hydra/launcher=clipx_slurm` and `clipx_local`, behind Hydra's -m.

options.py     what the launchers are told by hydra.launcher.…
sweep.py       the points of a sweep: composed, checked, told apart from those that are done, and kept in files
point.py       what one point's folder says
snapshot.py    the code that the points run
site.py        what the cluster says about itself and its jobs
slurm.py       job arrays: the script, through submitit, and its submission
local.py       processes of this machine, each point with its own devices
following.py   waiting for points
worker.py      one process of a point
status.py      the table of runs

Hydra finds the launchers in hydra_plugins/clipx_launcher.py. In a checkout this is the package `launch`, in a wheel
`clipx.launch`: its modules import each other relatively.
"""
