"""Runs and sweeps on clusters and on this machine: `hydra/launcher=clipx_slurm`, `clipx_local` and `clipx_torchrun`.

    options.py, network.py    options of the launchers, and of NCCL, gloo and torch on a cluster's network
    sweep.py, point.py        points of a sweep: composed, checked, compared with earlier ones, written to folders
    snapshot.py               copies the code that the points run
    cluster.py                asks SLURM for its limits and for the state of jobs
    sbatch_script.py          text of a job's script
    slurm.py                  submits job arrays through submitit
    local.py                  runs points as processes of this machine, each with its own devices
    torchrun.py               prints the command of each host where there is no SLURM
    print_script.py           `clipx-sweep script`: prints a script to start by hand
    progress.py               waits for points and prints their progress
    worker.py                 one process of a point
    commands/                 `clipx-sweep status|logs|cancel|resume|best|results`

Hydra finds the launchers through hydra_plugins/clipx_launcher.py.
"""
