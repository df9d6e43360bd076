"""Sweeps: one file, many points; each point is an ordinary run. Called by `prime_hpc.verbs.sweep` and, inside the job,
by `prime_hpc.launch.job` (`state.point_run_dir`).

    spec      a sweep file, read and checked; its axes expanded into points
    naming    names of points
    resolve   each point's experiment, checked, with the hash of what it computes
    state     the sweep's directory: points and submits, written ahead; the state of every point
    submit    what is missing or failed goes into arrays (packed) or lanes (het), or runs here without Slurm
    control   cancel
    results   the table of the metric, best first
    plot      its picture
"""
