"""Counter-based noise: the same number for (seed, position, vocabulary row), wherever and whenever it is drawn.

A sampled token is the argmax of scaled logit + Gumbel noise (the Gumbel-max trick: exactly a draw from the
softmax). The noise of a row comes from Philox4x64 keyed by the request's seed and the position of the token that
is drawn; the counter is the vocabulary row (four rows a counter). So a rank draws the noise of its own rows
only, and the token does not depend on the batch, the layout of ranks, or on a restart.
"""

from __future__ import annotations

import numpy as np
import torch

_WORDS_PER_COUNTER = 4


def gumbel_noise(*, seed: int, position: int, begin: int, count: int) -> torch.Tensor:
    """Standard Gumbel noise of vocabulary rows [begin, begin + count): float32, shape [count].

    `seed` and `position` are unsigned 64-bit numbers.
    """
    key = np.array([seed, position], dtype=np.uint64)
    counter, skip = divmod(begin, _WORDS_PER_COUNTER)
    words = np.random.Philox(key=key, counter=counter).random_raw(skip + count)[skip:]
    # The uniform x is used near 0, where float32 has its full relative precision: the large values of the
    # noise, which decide, come from small x. 2^-64 keeps x off 0.
    uniform = torch.from_numpy((words >> np.uint64(1)).view(np.int64)).to(torch.float32).mul_(2.0**-63)
    exponential = uniform.add_(2.0**-64).neg_().log1p_().neg_()
    return exponential.log_().neg_()
