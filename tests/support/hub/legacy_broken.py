"""A package that cannot be imported without a key."""

import os

KEY = os.environ["A_KEY_OF_A_JUDGE_THAT_NOBODY_HAS"]
