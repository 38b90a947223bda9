"""Launchers for clusters and for this machine: `hydra/launcher=clipx_slurm`, `clipx_local` and `clipx_torchrun`.

    options.py, slurm_spec.py options of the launchers
    sweep.py, point.py        compose, check and store the points of a sweep, and compare them with earlier ones
    snapshot.py               copies the code that the points run
    cluster.py                limits of the cluster and states of jobs, from SLURM's commands
    sbatch_script.py          script of a job: directives by submitit's executor, and what runs in the job
    job_start.sh, job_run.sh  its start, and the ranks by srun
    job_end.sh                its end: requeues the job, retries it, or ends it with a result
    site_check.py             asks SLURM whether it can run a job, and names the options for which it cannot
    slurm.py                  submits job arrays through submitit's executor
    local.py                  runs points as processes of this machine, each with separate devices
    torchrun.py               prints the torchrun script of a run on several hosts without SLURM
    print_script.py           `clipx-sweep script`: prints a script to submit or start by hand
    progress.py               waits for points and prints their progress
    worker.py                 runs one process of a point
    commands/                 `clipx-sweep status|logs|cancel|resume|usage|results`; report/: `clipx-sweep report`

Hydra discovers the launchers and the sweeper through hydra_plugins/clipx_plugins.py.
"""
