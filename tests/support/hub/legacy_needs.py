"""Needs a module that is not installed, when it is loaded."""

import verifiers as vf


def load_environment() -> vf.Environment:
    import not_a_module_of_anyone

    return not_a_module_of_anyone.env
