"""Segments of a reply: the smallest pieces at whose ends both tokenizations have a boundary, and the teacher's word on
each.

    policy    |def| main|(|):|          one token on both sides: a segment
    teacher   |def| ma|in|():|          `main` and `():` are the two others

A segment's gap is g_s = log p_teacher(s | before) - log p_policy(s | before), each the sum over the model's own tokens
of it. Every token of the policy carries the whole of its segment's gap:

    A_t = g_s(t)

It is the policy gradient of the reverse KL with segments for actions. With theta the policy's weights, and the places
where segments begin held fixed (the horizon of one action, as `opd` has it of one token),

    -d KL(p || q) = -d sum_s p(s) log (p(s) / q(s)) = sum_s p(s) g_s d log p(s)         (sum_s p(s) d log p(s) = 0)
                  = E_p [ g_s sum_{t in s} d log p(t) ]

since log p(s) is the sum of its tokens' log-probabilities. So the whole gap stands at each of them; shares of g_s / n
would be the gradient of another objective, in which a segment of n tokens counts 1 / n. The policy's log p of the
segment's earlier tokens could be left out of a later one's (given them it is a constant), and must not be: the teacher
has no word on parts of a segment, so that its log q(s) would stand there against a part of log p(s) alone, which is
unbiased too, but a rare beginning then weighs on what follows it although both models agree.

What is approximate: log p_teacher(s) is the probability of the one way in which its tokenizer cuts the text, a lower
bound of the text's own, which other ways to cut it share in; and where the teacher cuts may depend on what follows.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def align(policy: Integers, teacher: Integers) -> tuple[Integers, Integers, Integers]:
    """Return the segment of every token of the policy, int64 [n], of every token of the teacher, int64 [m], counted
    from 0 in order, and where each segment ends, in bytes.

    Args:
        policy: int64 [n], bytes of each of its tokens.
        teacher: int64 [m], likewise, of the same text.
    """
    ours, theirs = np.cumsum(policy), np.cumsum(teacher)
    assert policy.sum() == teacher.sum(), "not the same text"
    ends = np.intersect1d(ours, theirs)
    return np.searchsorted(ends, ours), np.searchsorted(ends, theirs), ends


def segment_gaps(policy: Floats, teacher: Floats, segments: Integers, teacher_segments: Integers) -> Floats:
    """Return each segment's gap, float64 [number of segments].

    Args:
        policy: float64 [n], log-probabilities of the policy's tokens.
        teacher: float64 [m], of the teacher's.
        segments: of the policy's tokens, see `align`.
        teacher_segments: of the teacher's.
    """
    number = int(max(segments.max(initial=-1), teacher_segments.max(initial=-1))) + 1
    sums = [np.bincount(places, values, number) for places, values in ((teacher_segments, teacher), (segments, policy))]
    return np.asarray(sums[0] - sums[1], np.float64)
