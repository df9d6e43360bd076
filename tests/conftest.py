"""Makes `tests` importable (pytest puts the folder above this package on the path), so that tests share `tests.support`."""
