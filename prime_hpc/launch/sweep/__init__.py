"""Sweeps: one file, many points; each point is an ordinary run.

spec      a sweep file, read and checked; its axes expanded into points
naming    names of points
resolve   each point's experiment, checked, with the hash of what it computes
state     the sweep's directory: points and submits, written ahead; the state of every point
submit    what is missing or failed goes into arrays (packed) or lanes (het), or runs here without Slurm
feed      more points than Slurm takes at once, sent as slots come free
cancel    take points out of the queue
results   the table of the metric, best first
plot      its picture
"""
