"""Makes `tests` importable (pytest puts the folder above on the path), so that tests share `tests.support`."""
