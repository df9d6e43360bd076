"""Uses a class that was never there."""

import verifiers as vf


class Quantum(vf.QuantumEnv):
    pass
