"""`python -m prime_hpc.evals.synthesis.main RUN_DIR`: the process of `synthesize`. The supervisor starts it."""

from prime_hpc.client.inference import InferenceError
from prime_hpc.envs.errors import EnvError
from prime_hpc.evals.episodes import ADVICE
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.synthesis.run import synthesize
from prime_hpc.store.role_process import leave, run_role

if __name__ == "__main__":
    leave(run_role("synthesize", synthesize, (EnvError, EvalError, InferenceError), advice=ADVICE))
