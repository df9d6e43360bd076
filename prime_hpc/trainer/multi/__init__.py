"""Many runs in one trainer (`trainer.max_concurrent_runs`): one frozen model, an adapter and all else for each run.

fair_queue.py   whose batch is next
run_slots.py    rank 0: which `run_*` directories there are, which hold a slot, which wait, how each ended
admission.py    rank 0: what a child must be, and where it goes on
child_run.py    a child's trainer on every rank: its view of the policy, optimizer, checkpoints
loop.py         the loop: rank 0 decides, all ranks obey
"""
