"""`python -m prime_hpc.evals.main RUN_DIR`: the process that evaluates. The supervisor starts it."""

from prime_hpc.client.inference import InferenceError
from prime_hpc.envs.errors import EnvError
from prime_hpc.evals.episodes import ADVICE
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.run import evaluate
from prime_hpc.store.role_process import leave, run_role

if __name__ == "__main__":
    leave(run_role("eval", evaluate, (EnvError, EvalError, InferenceError), advice=ADVICE))
