"""Runs and sweeps on clusters and on this machine: `hydra/launcher=clipx_slurm` and its like, behind Hydra's -m.

options.py     what the launchers are told by hydra.launcher.…
network.py     what NCCL, gloo and torch are told of the network
sweep.py       the points of a sweep: composed, checked, told apart from those that are done, and kept in files
point.py       what one point's folder says
snapshot.py    the code that the points run
site.py        what the cluster says about itself and its jobs
batch.py       the text of a job's script
slurm.py       job arrays, submitted through submitit
torchrun.py    the command of each host where there is no SLURM
script.py      `python -m launch.script`: prints what is to be started by hand
local.py       processes of this machine, each point with its own devices
following.py   waiting for points
worker.py      one process of a point
cli.py         `python -m clipx.sweep`, the commands that look after sweeps:
  status.py    the table of runs
  logs.py      what their ranks wrote
  cancel.py    ends points
  resume.py    launches points again
  best.py      the best point
  results.py   the table of all
  picture.py   the table as parallel coordinates
run.py         one run as its folder shows it
state.py       its state, by its files and by SLURM
runs.py        the runs in a folder

Hydra finds the launchers in hydra_plugins/clipx_launcher.py. In a checkout this is the package `launch`, in a wheel
`clipx.launch`: its modules import each other relatively.
"""
