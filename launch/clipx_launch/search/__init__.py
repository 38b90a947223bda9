"""Search of option values with Optuna: `hydra/sweeper=clipx_optuna`.

    spec.py       options of the sweeper
    check.py      checks and defaults without Optuna
    space.py      Hydra's sweep syntax as Optuna's distributions
    study.py      the study in the sweep's folder: storage, sampler, pruner
    search.py     proposes trials, launches them in batches, reports their metrics and prunes them

Hydra discovers the sweeper through hydra_plugins/clipx_plugins.py. Optuna is imported only if the sweeper is selected.
"""
