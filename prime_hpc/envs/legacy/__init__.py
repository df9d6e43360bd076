"""The older verifiers interface (`load_environment`, `SingleTurnEnv`, `ToolEnv`, `Rubric`, ...), on verifiers v1.

verifiers 0.4 has none of it any more, while most packages of the Environments Hub are written for it. `surface` gives
such packages the names that they import, `environments`, `rubrics` and `parsers` are what the names stand for, and
`taskset` plays the result as a v1 taskset.
"""
